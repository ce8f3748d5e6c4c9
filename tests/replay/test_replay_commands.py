"""Reading traces: exit codes, tables, sums, differences, and the debugger."""

from __future__ import annotations

import re

import msgspec
import pytest
from replay_tool import tool, tool_process

from pipeinfer.cli.operate import run_replay as main
from pipeinfer.messages import PROTOCOL, Abort, Done, Submit, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.replay.run import rebuild
from pipeinfer.replay.traces import first_mismatch, load
from pipeinfer.step_cost import StepCost
from pipeinfer.trace.format import MAGIC, End, TraceHeader, pack_header, pack_records

encode = msgspec.msgpack.encode


def header(**fields) -> TraceHeader:
    stage = fields.pop("stage", "scheduler-0")
    base = {"protocol": PROTOCOL, "version": "0.0", "stage": stage, "name": stage.split("-")[0]}
    return TraceHeader(**{**base, "stages": ("scheduler-0",), **fields})


def rows(*messages, direction="in", channel="requests", peer="gateway-0"):
    return [(float(n), direction, channel, peer, n, n - 0.1, encode(m)) for n, m in
            enumerate(messages, 1)]  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Writes a trace of some blocks by hand."""

    def write(*blocks, name="a.pitrace", **fields):
        path = tmp_path / name
        path.write_bytes(pack_header(header(**fields)) + b"".join(map(pack_records, blocks)))
        return path

    return write


# ----------------------------------------------------------------------------------- exit codes


def test_foreign_file_ends_with_code_3(tmp_path, capsys):
    file = tmp_path / "x.pitrace"
    file.write_bytes(b"not a trace at all")
    assert main(["run", "scheduler", str(file)]) == 3
    assert capsys.readouterr().err == f"error: {file}: this is no pipeinfer trace\n"
    assert main(["show", str(tmp_path / "missing.pitrace")]) == 3


def test_file_that_ends_within_its_header_ends_with_code_3(tmp_path, capsys):
    file = tmp_path / "x.pitrace"
    file.write_bytes(MAGIC + b"\x10\x00")
    assert main(["run", "scheduler", str(file)]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_damaged_block_ends_with_code_3_and_says_where(written, capsys):
    file = written(rows(Abort("r", 1)))
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 0xFF
    file.write_bytes(raw)
    assert main(["stats", str(file)]) == 3
    assert re.search(r"block 0 at byte \d+", capsys.readouterr().err)


def test_other_protocol_ends_with_code_4_and_names_both(written, capsys):
    file = written(protocol=PROTOCOL + 7)
    assert main(["run", "scheduler", str(file)]) == 4
    assert f"{PROTOCOL + 7}, this pipeinfer speaks {PROTOCOL}" in capsys.readouterr().err


def test_truncated_tail_is_a_warning(written, capsys):
    file = written(rows(Abort("r", 1), channel="work"), rows(Abort("q", 1), channel="work"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert main(["show", str(file)]) == 0
    shown = capsys.readouterr()
    assert "r" in shown.out and "is truncated: block 1 at byte" in shown.err
    assert main(["run", "scheduler", str(file)]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["run", "engine", "FILE"],
        ["run", "scheduler", "FILE", "--break"],
        ["run", "scheduler", "FILE", "--core-only"],
        ["run", "scheduler", "FILE", "--no-such-setting", "1"],
        ["run", "scheduler", "FILE", "another"],
        ["run", "scheduler", "FILE", "--policy", "no-such-policy"],
        ["timeline", "FILE", "--out", "x.pdf"],
        ["stats", "FILE", "FILE"],
        ["show"],
    ],
)
def test_wrong_usage_ends_with_code_2(written, words, capsys):
    file = str(written(rows(Abort("r", 1), channel="work")))
    try:
        code = main([file if word == "FILE" else word for word in words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert capsys.readouterr().err


def test_model_that_is_not_here_is_asked_for(written, capsys):
    file = written(stage="tokenizer-0", settings={"model": "/no/such/folder"})
    assert main(["run", "tokenizer", str(file)]) == 2
    assert "/no/such/folder is not here; name a copy with --model" in capsys.readouterr().err


def test_one_rank_of_several_is_replayed_without_its_device_only(written, capsys):
    file = written(stage="engine-0-1", stages=("engine-0-0", "engine-0-1"), settings={"tp": 2})
    assert main(["run", "engine", str(file)]) == 2
    assert "one of 2 ranks" in capsys.readouterr().err


def test_graphs_that_were_measured_otherwise_are_said_and_no_difference(session):
    recording = load(session["engine"])
    facts = {**recording.header.facts, "graph_sizes": [2, 4]}
    recording.header = msgspec.structs.replace(recording.header, facts=facts)
    assert "CUDA graphs of sizes [2, 4]" in rebuild(recording, "", {}).warnings[0]
    hello = next(e.message for e in recording.entries if e.kind == "Hello")
    cost = StepCost(((1, 9),), ((128, 20, 0),))
    other = msgspec.structs.replace(hello, graph_sizes=(2, 4), step_cost=cost, version="x")
    assert first_mismatch(hello, other) is None
    assert first_mismatch(hello, msgspec.structs.replace(other, pages=1)).field == "pages"


def test_stage_that_raises_ends_with_code_5_and_a_traceback(written, capsys):
    work = TokenizedRequest("r", 1, 0, 0, b"", RequestParams(), 0)  # no tokenizer takes that
    stages = ("tokenizer-0", "scheduler-0")
    file = written(rows(Done(()), work, channel="work"), stage="tokenizer-0", stages=stages)
    assert main(["run", "tokenizer", str(file), "--json"]) == 5
    shown = capsys.readouterr()
    assert "Traceback" in shown.err and "crashed on message 1: TokenizedRequest" in shown.err
    assert '"replayed": "TypeError: the tokenizer takes no TokenizedRequest"' in shown.out


def test_missing_last_outputs_count_only_if_the_recording_ended_in_order(written, capsys):
    submit = Submit("r", 1, 0, RequestParams(), 0, text="x")
    stages = ("tokenizer-0", "scheduler-0")
    killed = rows(submit)
    ended = [*killed, (0.0, "note", "local", "", 0, 0.0, encode(End("it was told to stop")))]
    file = written(killed, stage="tokenizer-0", stages=stages)
    assert main(["run", "tokenizer", str(file)]) == 0
    file = written(ended, stage="tokenizer-0", stages=stages)
    assert main(["run", "tokenizer", str(file)]) == 1
    assert "came of   message 0: Submit" in capsys.readouterr().out


# --------------------------------------------------------------------------------------- the tables


def test_show_filters_by_request_channel_type_and_time(written, capsys):
    file = written(rows(Abort("r", 1), Abort("q", 2), Done(("r", "q")), channel="work"))

    def shown(*options: str) -> list[str]:
        assert main(["show", str(file), *options]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]

    assert shown() == ["0", "1", "2"]
    assert shown("--request", "q") == ["1", "2"]
    assert shown("--type", "Done") == ["2"]
    assert shown("--channel", "plan") == []
    assert shown("--from", "0.5", "--to", "1.5") == ["1"]


def test_request_is_followed_through_its_slots(session):
    recording = load(session["engine"])
    request = next(
        e.message.admits[0].request_id for e in recording.entries
        if e.kind == "Plan" and e.message.admits
    )  # fmt: skip
    done = tool("show", session["engine"], "--request", request)
    kinds = [line.split()[5] for line in done.stdout.splitlines()[2:]]
    assert {"Plan", "Result", "Admitted", "StepDone"} <= set(kinds)
    assert len(kinds) < len(recording.entries) / 2


def test_stats_count_every_message_and_every_request(session):
    done = tool("stats", *session.values())
    assert done.returncode == 0, done.stderr
    for stage, path in session.items():
        recording = load(path)
        section = done.stdout.split(recording.title)[1].split("pitrace:")[0].split("hops,")[0]
        counts = [
            int(n) for n in re.findall(r"^  (?:in|out|note) +\w+ +\w+ +(\d+) ", section, re.M)
        ]
        assert sum(counts) == len(recording.entries), stage
    assert re.search(r"scheduler-0 +-> engine-0-0 +plan +p50 \d", done.stdout)
    calls = sum(1 for e in load(session["gateway"]).entries if e.kind == "Call")
    assert f"requests: {calls}, preempted" in done.stdout


def test_diff_finds_the_first_message_that_differs(written, capsys):
    a = written(rows(Abort("r1", 1), Abort("r2", 1), Done(("r1",)), channel="work"))
    same = rows(Abort("zz", 1), Abort("yy", 1), Done(("zz",)), channel="work")
    b = written(same, name="b.pitrace")
    assert main(["diff", str(a), str(b)]) == 0
    assert "no difference in 3 messages" in capsys.readouterr().out
    other = rows(Abort("zz", 1), Abort("yy", 1), Done(("yy",)), channel="work")
    assert main(["diff", str(a), str(written(other, name="c.pitrace"))]) == 1
    assert "Done.request_ids[0]: 'r0' and 'r1'" in capsys.readouterr().out
    shorter = written(same[:2], name="d.pitrace")
    assert main(["diff", str(a), str(shorter)]) == 1
    shown = capsys.readouterr().out
    assert "B ended before" in shown and re.search(r"in +work +Done +1 +0", shown)


# --------------------------------------------------------------------------------------- playing


def test_debugger_stops_just_before_the_message(session):
    recording = load(session["scheduler"])
    plan = next(e for e in recording.entries if e.kind == "Plan" and e.message.number == 5)
    done = tool_process(
        "run", "scheduler", session["scheduler"], "--until", plan.seq, "--break",
        stdin="p core.counts['plans']\np type(message).__name__\nc\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cause = max(e.seq for e in recording.entries if e.direction == "in" and e.seq < plan.seq)
    assert f"message {cause}: " in done.stdout and "before it is handled" in done.stdout
    counted = int(re.search(r"\(Pdb\) (\d+)", done.stdout)[1])
    assert counted in (4, 5)  # of one input come up to two plans
    assert f"equal up to message {plan.seq}" in done.stdout


def test_realtime_takes_as_long_as_the_recording(written):
    first, last = rows(Abort("r", 1), channel="work"), rows(Abort("q", 1), channel="work")
    file = written([*first, (2.2, *last[0][1:])])
    done = tool("run", "scheduler", file, "--realtime")
    assert done.returncode == 0, done.stdout + done.stderr
    took, recorded = map(
        float, re.search(r"took ([\d.]+) s, the recording ([\d.]+)", done.stdout).groups()
    )
    assert recorded == pytest.approx(1.2)
    assert took >= 1.2


def test_settings_given_win_over_the_recorded_ones(session):
    done = tool("run", "scheduler", session["scheduler"], "--overlap-depth", "1")
    assert done.returncode == 1
    assert "channel plan" in done.stdout

"""`pipeinfer record` on a live server."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from rebuilt import events, fresh, outputs

from pipeinfer.messages import BeginEpoch, Done, Fault, Hello, Plan, Result, Submit
from pipeinfer.trace.format import End, Trace
from pipeinfer.trace.snapshot import restore
from servers import STAGES, Server, environment

QUICK = ("--kv-pages", "300", "--threads", "1")
SECONDS = ("0.8", "4", "20")  # of recordings, until one has enough: machines differ
BODY = {"prompt": "count from 1 to 99", "max_tokens": 120, "ignore_eos": True, "temperature": 0}


class Recorded(Server):
    """A server with a temporary folder of its own, so that it is the only one to be found."""

    def __init__(self, *arguments: str) -> None:
        self.temporary = tempfile.mkdtemp(prefix="rec-", dir="/tmp")  # short: sockets lie in it
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = self.temporary
        try:
            super().__init__(*QUICK, *arguments)
        finally:
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before

    def record(self, *arguments: str, interrupt: threading.Event | None = None):
        """The finished `pipeinfer record *arguments`; `interrupt` presses Ctrl-C."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeinfer", "record", *arguments],
            env={**environment(), "TMPDIR": self.temporary},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if interrupt is not None:
            assert interrupt.wait(60)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def busy(self) -> threading.Event:
        """Sends requests in turn until the event is set; all answers must be the same."""
        over = threading.Event()
        self.answers: list[str] = []

        def work() -> None:
            while not over.is_set():
                status, answer = self.post("/v1/completions", BODY)
                self.answers.append(answer["choices"][0]["text"] if status == 200 else str(answer))

        self.worker = threading.Thread(target=work, daemon=True)
        self.worker.start()
        return over


@pytest.fixture(scope="module")
def server():
    with Recorded() as made:
        yield made


def traces(folder: Path) -> dict[str, Trace]:
    found = [Trace(path) for path in folder.glob("*.pitrace")]
    return {trace.header.name: trace for trace in found}


def replays(trace: Trace) -> int:
    """Restores and replays a trace; how many inputs it has."""
    core = fresh(trace) if trace.header.name != "engine" else fresh_engine(trace)
    if trace.header.snapshot is not None:
        restore(core, trace.header.snapshot)
    everything = events(trace)
    for number, (event, expected) in enumerate(everything):
        assert outputs(core, event) == expected, (trace.path, number, event)
    return len(everything)


def fresh_engine(trace: Trace):
    facts, header = trace.header.facts, trace.header
    from pipeinfer.engine.core import EngineCore
    from pipeinfer.memory.manager import MemoryManager
    from pipeinfer.memory.page_directory import ChainTracker

    hello = Hello(
        header.protocol, header.version, 0, 1, header.incarnation, "", facts["page_size"],
        facts["pages"] - 1, facts["max_slots"], facts["max_model_len"], facts["attention"],
    )  # fmt: skip
    sizes = facts["pages"], facts["page_size"], facts["max_slots"]
    chains = ChainTracker(*sizes) if facts["keeps_pages"] else None
    memory = MemoryManager(*sizes, facts["max_model_len"], chains=chains)
    return EngineCore(hello, "scheduler-0", memory)


def test_a_busy_server_is_recorded_from_mid_life_and_every_stage_replays(server, tmp_path):
    expected = server.post("/v1/completions", BODY)[1]["choices"][0]["text"]
    over = server.busy()
    server.wait(lambda: server.metric("pipeinfer_requests_running") > 0, "a running request")
    enough = threading.Event()

    def watch() -> None:
        """Whole requests are recorded, however long they take on a busy machine."""
        server.wait(lambda: len(list(tmp_path.glob("*.pitrace"))) == len(STAGES), "files")
        many = len(server.answers) + 2
        server.wait(lambda: len(server.answers) >= many, "answers")
        enough.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = server.record("--out", str(tmp_path), interrupt=enough)
    watcher.join()
    over.set()
    server.worker.join(60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recording into") == done.stdout.count("told to stop") == len(STAGES)
    found = traces(tmp_path)
    assert set(found) == set(STAGES)
    for trace in found.values():
        assert trace.header.snapshot is not None and replays(trace) > 0
        assert isinstance(trace.message(list(trace)[-1]), End)
    heard = {type(event) for (_, event), _ in events(found["tokenizer"])}
    assert heard >= {Submit, Done}, "a tokenizer has little to do, but not nothing"
    assert set(server.answers) == {expected}, "recording is not noticed by clients"


def test_an_engine_is_recorded_from_an_epoch_that_begins_with_empty_memory(server, tmp_path):
    over = server.busy()
    server.wait(lambda: server.metric("pipeinfer_requests_running") > 0, "a running request")
    done = server.record("--out", str(tmp_path), "--stage", "engine-0-0", "--messages", "200")
    over.set()
    server.worker.join(60)
    assert done.returncode == 0, done.stderr
    messages = [
        m for (_, event), out in events(Trace(next(tmp_path.iterdir()))) for m in (event, *out)
    ]
    fault = next(i for i, m in enumerate(messages) if isinstance(m, Fault))
    begin = next(i for i, m in enumerate(messages) if isinstance(m, BeginEpoch))
    assert messages[fault].orderly and fault < begin
    after = messages[begin:]
    assert any(isinstance(m, Plan) for m in after) and any(isinstance(m, Result) for m in after)


def test_an_engine_need_not_begin_anew(server, tmp_path):
    arguments = ("--stage", "engine", "--messages", "30", "--no-fresh-epoch")
    done = server.record("--out", str(tmp_path), *arguments)
    assert done.returncode == 0, done.stderr
    trace = Trace(next(tmp_path.iterdir()))
    assert not any(isinstance(m, Fault) for _, out in events(trace) for m in out)
    assert len(list(trace)) >= 31 and replays(trace) > 0


def test_ctrl_c_ends_a_recording_in_order(server, tmp_path):
    pressed = threading.Event()
    watcher = threading.Thread(
        target=lambda: server.wait(lambda: list(tmp_path.glob("*")), "a file") and pressed.set()
    )
    watcher.start()
    done = server.record("--out", str(tmp_path), "--stage", "tokenizer", interrupt=pressed)
    watcher.join()
    assert done.returncode == 0, done.stderr
    assert "told to stop" in done.stdout
    trace = Trace(next(tmp_path.iterdir()))
    assert isinstance(trace.message(list(trace)[-1]), End) and not trace.truncated


def test_a_redacted_recording_says_nothing_of_the_prompts(server, tmp_path):
    over = server.busy()
    server.wait(lambda: server.metric("pipeinfer_requests_running") > 0, "a running request")
    for seconds in SECONDS:
        folder = tmp_path / seconds
        done = server.record("--out", str(folder), "--seconds", seconds, "--redact")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"after {seconds} s") == len(STAGES)
        key = folder / "redaction.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        found = traces(folder)
        for trace in found.values():
            assert trace.header.redacted
            raw = b"".join(r.body for r in trace) + (trace.header.snapshot or b"")
            assert b"count from" not in raw
        if (many := replays(found["scheduler"])) > 10:
            break
    over.set()
    server.worker.join(60)
    assert many > 10


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stage", "motor"), "no 'motor'"),
        (("--seconds", "0"), "must be above 0"),
        (("--redact", "/nowhere/key"), "/nowhere/key: No such file"),
        (("--topology", "/nowhere.toml"), "cannot read topology"),
    ],
)
def test_wrong_usage_is_refused(server, tmp_path, arguments, said):
    done = server.record("--out", str(tmp_path), *arguments)
    assert done.returncode == 2 and said in done.stderr


def test_a_folder_that_cannot_be_written_fails_with_the_stages_reason(server, tmp_path):
    (tmp_path / "file").touch()
    done = server.record("--out", str(tmp_path / "file" / "x"), "--stage", "scheduler")
    assert done.returncode == 1
    assert "scheduler-0: failed" in done.stderr and "Not a directory" in done.stderr

"""The tool that compares revisions gives the same ids twice, and finds a fault that is planted."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import servers
from same_tokens import TOOL
from same_tokens.requests import draw
from same_tokens.run import memory_changes_nothing

ROOT = Path(__file__).resolve().parents[2]
SESSION, EACH = 40, 4
FEW = ("--session", str(SESSION), "--each", str(EACH))
TWO = ("--architectures", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM")
# As if a revision had lost a parameter on its way.
FORGETS_TOP_P = """
_sound = truncation_thresholds

def truncation_thresholds(x, top_k, top_p, min_p):
    return _sound(x, top_k, top_p * 0 + 1, min_p)
"""


def run(out: Path, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "tools/same_tokens", "run", *FEW, *arguments, "--json", str(out)],
        cwd=ROOT, env=servers.environment(), capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())["metrics"]["parts"]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The file of one run, and its parts."""
    out = tmp_path_factory.mktemp("runs") / "first.json"
    return out, run(out, *TWO)


@pytest.fixture
def compared(capsys):
    """Exit code, the line of JSON, and the lines of differences, of two files."""

    def compare(one: Path, other: Path) -> tuple[int, dict, list[str]]:
        code = TOOL.main(["compare", str(one), str(other)])
        said = capsys.readouterr()
        return (
            code,
            json.loads(said.out),
            [line.removeprefix("broken: ") for line in said.err.splitlines()],
        )

    return compare


def test_a_second_run_gives_the_same_digests(first, tmp_path, compared):
    out, parts = first
    assert list(parts) == [*TWO[1:], "session-scarce", "session-roomy"]
    again = run(tmp_path / "again.json", *TWO)
    assert {n: p["digest"] for n, p in again.items()} == {n: p["digest"] for n, p in parts.items()}
    code, said, lines = compared(out, tmp_path / "again.json")
    assert (code, said["same"], said["differ"], lines) == (0, 2 * EACH + 2 * SESSION, 0, [])
    assert said["alone"] == said["other_rounding"] == []


def test_the_session_has_preemptions_hits_and_clients_that_leave_and_memory_changes_no_id(first):
    scarce, roomy = first[1]["session-scarce"], first[1]["session-roomy"]
    assert scarce["preemptions"] > 0 == roomy["preemptions"]
    assert roomy["cached_tokens"] > 100
    assert set(scarce["finish"]) == {"left", "length", "stop"}
    assert scarce["requests"] == roomy["requests"] and memory_changes_nothing(first[1])
    other = first[1] | {"session-roomy": roomy | {"digest": "another"}}
    assert not memory_changes_nothing(other)


def test_a_fault_in_another_tree_is_found_in_the_requests_that_it_concerns(
    first, tmp_path, compared
):
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tests/parity").mkdir(parents=True)
    shutil.copy(ROOT / "tests/parity/cores.py", tree / "tests/parity")
    with (tree / "src/pipeinfer/kernels/host.py").open("a") as sampler:
        sampler.write(FORGETS_TOP_P)
    run(tmp_path / "other.json", "--tree", str(tree), "--architectures")
    code, said, lines = compared(first[0], tmp_path / "other.json")
    assert code == 1 and said["differ"] == len(lines) > 2 and said["alone"] == sorted(TWO[1:])
    concerned = {
        one.name
        for one in draw(SESSION, seed=2)
        if one.knobs.get("top_p") and one.knobs["temperature"]
    }
    assert {line.partition(":")[0].partition("/")[2] for line in lines} <= concerned


def test_each_kind_of_difference_is_said(first, tmp_path, compared):
    out, _ = first
    whole = json.loads(out.read_text())
    other = copy.deepcopy(whole)
    parts = other["metrics"]["parts"]
    requests = parts["session-roomy"]["requests"]
    name = next(name for name, one in requests.items() if len(one["ids"]) > 4)
    ids, last = requests[name]["ids"], f"r{SESSION - 1}"
    requests[name]["ids"] = [*ids[:2], ids[2] + 1, *ids[3:]]
    parts["session-scarce"]["requests"][name]["ids"] = ids[:3]
    ended = next(one for one in parts[TWO[1]]["requests"].values() if one["finish"] == "stop")
    ended["finish"] = "length"
    del requests[last], parts[TWO[2]]
    parts["session-scarce"]["weights"] = "others"
    other["metrics"]["versions"]["torch"] = "0"
    (tmp_path / "other.json").write_text(json.dumps(other))
    code, said, lines = compared(out, tmp_path / "other.json")
    assert (code, said["differ"], said["other_rounding"]) == (1, 3, ["torch"])
    assert said["alone"] == [TWO[2], f"session-roomy/{last}"]
    assert any(f"session-roomy/{name}: from token 2 on, [{ids[2]}" in line for line in lines)
    assert f"session-scarce/{name}: from token 3 on, {ids[3:6]} and []" in lines
    assert "session-scarce: the checkpoints are not the same" in lines
    assert any(line.endswith("ends by stop and length") for line in lines)


def test_what_is_no_result_is_refused(first, tmp_path, capsys):
    (tmp_path / "none.json").write_text("{}")
    assert TOOL.main(["compare", str(first[0]), str(tmp_path / "none.json")]) == 2
    assert "no result" in capsys.readouterr().err


def test_a_shorter_session_is_the_beginning_of_a_longer_one():
    assert draw(20, seed=3) == draw(50, seed=3)[:20] != draw(20, seed=4)

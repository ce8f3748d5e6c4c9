"""A recorded session of 70 mixed requests; REPLAY_REQUESTS says how many else."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from preemptions import preempting_plans
from replay_tool import tool_process

from pipeinfer import demo
from pipeinfer.replay.traces import load

TRIES = 5  # how often requests give way depends on the machine's pace; in one of hundreds, never
PREEMPTING = 2  # plans at least: in one alone, a wrong victim may be the right one
FEW = ("--kv-pages", "26")  # the largest request still fits
REQUESTS = int(os.environ.get("REPLAY_REQUESTS", "70"))


def model_with_a_first_token(folder: Path) -> Path:
    """The demo model with a tokenizer that puts a special token first when it is asked to."""
    shutil.copytree(Path(demo.__file__).parent, folder, ignore=shutil.ignore_patterns("*.py*"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    first, text = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"id": "A", "type_id": 0}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": text}],
        "pair": [first, {"Sequence": text}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
        },
    }
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="session")
def session(tmp_path_factory) -> dict[str, Path]:
    """{stage name: its trace} of one session; the first worker that wants it records it."""
    folder = tmp_path_factory.getbasetemp()
    shared = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "replay-session"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            model = model_with_a_first_token(shared / "model")
            for _ in range(TRIES):
                shutil.rmtree(shared / "traces", ignore_errors=True)
                done = tool_process(
                    "session", "--out", shared / "traces", "--requests", REQUESTS, *FEW, model
                )
                assert done.returncode == 0, done.stdout + done.stderr
                plans = preempting_plans(load(next((shared / "traces").glob("scheduler-*"))))
                if len(plans) >= PREEMPTING:
                    break
            (shared / "done").write_text(done.stdout)
    traces = sorted((shared / "traces").glob("*.pitrace"))
    return {path.name.partition("-")[0]: path for path in traces}

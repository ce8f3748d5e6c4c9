"""What production leaves behind replays too: crashes, killed stages, recordings from mid-life."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from replay_tool import ROOT, tool

import servers
from pipeinfer.engine.runner import Runner
from pipeinfer.engine.step_builder import RequestTable
from pipeinfer.replay.traces import CannotReplay, load

FLAGS = ("--threads", "1", "--kv-pages", "200", "--device", "cpu", "--dtype", "float32")
BODY = {"model": None, "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
PROMPTS = [{**BODY, "prompt": f"stream {number}", "seed": number} for number in range(100, 104)]

DIES_OF_A_SEED = """
from pipeinfer.engine import step_builder
right = step_builder.RequestTable.put
def put(self, admit):
    if admit.seed == 13:
        raise OverflowError("Python int too large to convert to C long")
    right(self, admit)
step_builder.RequestTable.put = put
"""
DEVICE_FAILS_ON_A_SEED = """
from pipeinfer.engine import runner
right = runner.Runner._logits
def logits(self, views, plan, logprobs=None):
    found = right(self, views, plan, logprobs)
    if 13 in views.sampling["seed"].tolist():
        raise RuntimeError(f"step of {views.shape.num_rows} rows: no kernel for this seed")
    return found
runner.Runner._logits = logits
"""


@contextlib.contextmanager
def streams(url: str, *bodies: dict, again: bool = True):
    """Requests that run while the block does, each asked again when it has ended; whatever becomes
    of them is fine."""
    over = threading.Event()

    def run(body: dict) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it may be cut off
            servers.fetch(url + "/v1/completions", json.dumps(body).encode())
            while again and not over.is_set():
                servers.fetch(url + "/v1/completions", json.dumps(body).encode())

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.parametrize("bug", [DIES_OF_A_SEED, DEVICE_FAILS_ON_A_SEED], ids=["core", "device"])
def test_flight_recording_reproduces_the_fault(tmp_path, monkeypatch, bug):
    plant, flights = tmp_path / "plant", tmp_path / "flights"
    plant.mkdir()
    # In engines alone: the other processes would import torch for it.
    in_engines = f"import sys\nif 'engine' in sys.orig_argv: exec({bug!r})\n"
    (plant / "sitecustomize.py").write_text(in_engines)
    monkeypatch.setenv("PYTHONPATH", str(plant), prepend=os.pathsep)
    with servers.Server(*FLAGS, "--flight-dir", str(flights)) as server:
        body = {**BODY, "prompt": "x", "seed": 13, "max_tokens": 5}
        with streams(server.url, body, again=False):
            flight = server.wait(lambda: written(server), "a flight recording")
            end(server)  # it would start the engine again and try the request alone
    monkeypatch.undo()

    with monkeypatch.context() as patch:
        for whose, name in ((RequestTable, "put"), (Runner, "_logits")):
            patch.setattr(whose, name, getattr(whose, name))  # so that it is put back
        exec(bug, {})
        same = tool("run", "engine", flight, "--json")
    assert same.returncode == 5, same.stdout + same.stderr
    assert "reproduced: same exception" in same.stderr and "Traceback" in same.stderr
    assert json.loads(same.stdout)["recorded"] == load(flight).header.error

    repaired = tool("run", "engine", flight, "--json")
    assert repaired.returncode == 1, repaired.stdout + repaired.stderr
    found = json.loads(repaired.stdout)
    if bug is DIES_OF_A_SEED:
        # The recorded core never answered this plan; everything before it was equal.
        assert found["recorded"] in ("(missing)", load(flight).header.error)
    else:
        assert (found["field"], found["recorded"]) == ("type", "StepFailed")


def end(server: servers.Server) -> None:
    """At once: the second SIGTERM tells it not to wait for its streams."""
    while server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(0.3)


def written(server: servers.Server) -> Path | None:
    """The engine's flight recording, once all of it is in its file."""
    said = [line.partition("the flight recording is in ")[2] for line in list(server.log)]
    return next((Path(file) for file in said if "flight-engine-" in file), None)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """(folder of traces, {stage: pid that was killed}) of a server that lost one by one."""
    out, pids = tmp_path_factory.mktemp("killed"), {}
    with servers.Server(*FLAGS, "--record", str(out)) as server, streams(server.url, *PROMPTS):
        for victim in VICTIMS:
            before = server.metric("pipeinfer_generated_tokens_total")
            server.wait(
                lambda least=before + 20: server.metric("pipeinfer_generated_tokens_total") > least,
                "tokens",
            )
            pids[victim] = server.pid(victim)
            os.kill(pids[victim], signal.SIGKILL)
        server.wait(lambda: recovered(out, pids["detokenizer"]), "an answer to the successor")
        end(server)
    return out, pids


def recovered(folder: Path, killed: int) -> bool:
    """Whether the detokenizer that came after that process has recorded what it was answered."""
    for trace in folder.glob("detokenizer-*.pitrace"):
        with contextlib.suppress(CannotReplay):  # its header is not there yet
            kinds = [entry.kind for entry in load(trace).entries]
            if not trace.name.endswith(f"-{killed}.pitrace") and "Recovered" in kinds:
                return True
    return False


VICTIMS = ("detokenizer", "scheduler", "engine")


@pytest.mark.parametrize("victim", VICTIMS)
def test_trace_of_a_killed_stage_loads_and_replays(killed, victim):
    folder, pids = killed
    [trace] = folder.glob(f"{victim}-*-{pids[victim]}.pitrace")
    assert load(trace).end is None
    done = tool("run", victim, trace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences" in done.stdout


def test_trace_of_a_successor_replays(killed):
    """It began by asking its neighbours what it should know."""
    folder, pids = killed
    [trace] = set(folder.glob("detokenizer-*.pitrace")) - {
        *folder.glob(f"detokenizer-*-{pids['detokenizer']}.pitrace")
    }
    assert any(entry.kind == "Recovered" for entry in load(trace).entries)
    done = tool("run", "detokenizer", trace)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def middle(tmp_path_factory) -> Path:
    """Traces of `pipeinfer record` on a server with running streams; the second is redacted."""
    out = tmp_path_factory.mktemp("middle")
    with servers.Server(*FLAGS) as server, streams(server.url, *PROMPTS):
        server.wait(lambda: server.metric("pipeinfer_generated_tokens_total") > 20, "tokens")
        topology = [
            p for p in Path("/tmp").glob("pipeinfer-*/pipeinfer.toml") if belongs(p, server)
        ]
        for folder, more in ((out / "plain", ()), (out / "redacted", ("--redact",))):
            done = subprocess.run(
                [sys.executable, "-m", "pipeinfer", "record", "--topology", str(topology[0]),
                 "--out", str(folder), "--messages", "150", "--seconds", "3", *more],
                cwd=ROOT, env=servers.environment(), capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        end(server)
    return out


def belongs(topology: Path, server: servers.Server) -> bool:
    """Whether a stage of this server was started with that topology file."""
    command = Path(f"/proc/{server.pid('scheduler')}/cmdline").read_bytes()
    return str(topology).encode() in command


@pytest.mark.parametrize("stage", servers.STAGES)
def test_recording_that_begins_in_mid_life_replays(middle, stage):
    [trace] = (middle / "plain").glob(f"{stage}-*.pitrace")
    assert load(trace).header.snapshot is not None
    done = tool("run", stage, trace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences" in done.stdout
    if stage == "engine":
        assert "begins with the BeginEpoch at message" in done.stdout
        core = tool("run", stage, trace, "--core-only")
        assert core.returncode == 0, core.stdout + core.stderr


def test_redacted_trace_replays_the_scheduler_and_says_so_for_others(middle):
    for stage in servers.STAGES:
        [trace] = (middle / "redacted").glob(f"{stage}-*.pitrace")
        done = tool("run", stage, trace)
        if stage == "scheduler":
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert done.returncode == 2
            assert "only a scheduler's can be replayed" in done.stderr

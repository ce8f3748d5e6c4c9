"""`snapshot`: how long a stage's loop stops when the flight recorder takes its core's state.

Builds cores of a given size, each in a process of its own, and takes their state as a stage does.
Knows cores and messages; no model beyond the demo's tokenizer.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeinfer.core import Core
from pipeinfer.demo import demo_path
from pipeinfer.detokenizer.core import DetokenizerCore
from pipeinfer.detokenizer.text import DecoderFactory
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.events import Call
from pipeinfer.gateway.health import ExpectedStage
from pipeinfer.gateway.ledger import MAX_ENDED
from pipeinfer.messages import (
    Accepted,
    Delivered,
    Heartbeat,
    Message,
    Open,
    Refused,
    Text,
    TextRow,
    TokenRow,
    Tokens,
    Work,
)
from pipeinfer.packing import pack
from pipeinfer.params import SamplingParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.text.files import read_tokenizer_config
from pipeinfer.text.loading import load_tokenizer
from pipeinfer.trace.format import unpack_state
from pipeinfer.trace.state_copy import StateCopier

TOOLS = Path(__file__).resolve().parents[1]
PROMPT, VOCABULARY = 500, 250
ROUNDS = 9
PARAMS = SamplingParams(max_tokens=4_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("--sizes", nargs="+", default=["256x500", "3000x1000"], metavar="REQUESTSxOUTPUTS")
    add("--stages", nargs="+", default=[*CORES], choices=[*CORES])


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    print(f"{'':27}{'process':>9}{'state':>10}{'at once':>12}{'fork':>18}{'CPU':>11}{'copied':>11}")
    results: dict[str, Any] = {}
    for stage in options.stages:
        for size in options.sizes:
            found = results[f"{stage} {size}"] = _in_a_process(stage, size)
            fork = f"{found['fork_ms']:.2f}, {found['fork_max_ms']:.2f} ms"
            sizes = f"{found['process_mb']:6.0f} MB{found['state_mb']:7.1f} MB"
            print(
                f"{stage:14}{size:>13}{sizes}{found['at_once_ms']:9.1f} ms{fork:>18}"
                f"{found['fork_cpu_ms']:8.2f} ms{found['copied_ms']:8.0f} ms"
            )
    return results


def _in_a_process(stage: str, size: str) -> dict[str, float]:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from bench import snapshot"
    words = [sys.executable, "-c", f"{code}; snapshot.alone(*sys.argv[2:])", str(TOOLS)]
    done = subprocess.run([*words, stage, size], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def alone(stage: str, size: str) -> None:
    """One measurement, in this process; prints JSON.

    at_once_ms: a walk on the loop. fork_ms, fork_max_ms: for how long taking the state keeps the
    loop from its work instead, median and most; fork_cpu_ms: its processor time, which a busy
    machine does not change. copied_ms: until the state is there.
    """
    requests, outputs = map(int, size.split("x"))
    core, events = CORES[stage](requests, outputs)
    gc.collect()
    gc.freeze()  # as a stage does when it is built
    walls, processor, copied = [], [], []
    for _ in range(ROUNDS):
        core.handle(events(), 2.0)  # dirties what a stage at work has dirtied since the last one
        wall, cpu, whole = _copied(core)
        walls.append(wall)
        processor.append(cpu)
        copied.append(whole)
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    begun = time.perf_counter()  # last, since it makes the process larger
    state = StateCopier(forks=False).take(core)
    at_once = time.perf_counter() - begun
    parts = {
        "process_mb": memory / 1e6,
        "state_mb": len(unpack_state(state.packed(lambda: False))) / 1e6,
        "at_once_ms": at_once * 1e3,
        "fork_ms": statistics.median(walls),
        "fork_max_ms": max(walls),
        "fork_cpu_ms": statistics.median(processor),
        "copied_ms": statistics.median(copied),
    }
    print(json.dumps(parts))


def _copied(core: Core) -> tuple[float, float, float]:
    """(ms of the fork, ms of processor time, ms until the state is there)."""
    copier = StateCopier(forks=True)
    copier.small = False  # as it has found out
    begun, cpu = time.perf_counter(), time.thread_time()
    copied = copier.take(core)
    wall, cpu = time.perf_counter() - begun, time.thread_time() - cpu
    copied.packed(lambda: False)
    return wall * 1e3, cpu * 1e3, (time.perf_counter() - begun) * 1e3


# --------------------------------------------------------------------------------- states of stages


def _ids(count: int) -> bytes:
    return pack(np.random.default_rng(count).integers(0, VOCABULARY, count))


def _names(requests: int) -> list[str]:
    return [f"cmpl-{number:032x}" for number in range(requests)]


Made = tuple[Core, Callable[[], Message]]


def _scheduler(requests: int, outputs: int) -> Made:
    core, names = SchedulerCore(SchedulerOptions("mixed", 2, requests, 2048)), _names(requests)
    prompt, said = _ids(PROMPT), _ids(outputs)
    for name in names:
        core.handle(Delivered(request_id=name, attempt=1, ids=said), 1.0)
        core.handle(
            Work(
                request_id=name,
                attempt=1,
                gateway=0,
                detokenizer=0,
                prompt_ids=bytes(bytearray(prompt)),
                params=PARAMS,
                seed=7,
                eos_ids=(1, 2),
            ),
            1.0,
        )
    return core, lambda: Delivered(request_id="nobody", attempt=1, ids=b"")


def _gateway(requests: int, outputs: int) -> Made:
    names = _names(requests)
    core = GatewayCore([ExpectedStage("tokenizer-0", "tokenizer")])
    core.handle(
        Heartbeat(
            stage="tokenizer-0",
            name="tokenizer",
            group=0,
            rank=0,
            index=0,
            pid=1,
            incarnation=1,
            state="ready",
        ),
        1.0,
    )
    for name in [*(f"cmpl-old-{n}" for n in range(MAX_ENDED)), *names]:
        chat = [{"role": "user", "content": "count " * 300}]
        core.handle(Call(name, PARAMS, chat=chat), 1.0)
        core.handle(Accepted(request_id=name, attempt=1, group=0, prompt_tokens=PROMPT), 1.0)
        if name.startswith("cmpl-old"):
            core.handle(
                Refused(request_id=name, attempt=1, gateway=0, status=503, message="over"), 1.0
            )
    told = [outputs]

    def more() -> Message:
        told[0] += 1
        return Text(
            tuple(
                TextRow(
                    request_id=n,
                    attempt=1,
                    text="x",
                    byte_offset=told[0] - 1,
                    token_offset=told[0] - 1,
                    ids=_ids(1),
                )
                for n in names
            )
        )

    core.handle(
        Text(
            tuple(
                TextRow(
                    request_id=n,
                    attempt=1,
                    text="x" * outputs,
                    byte_offset=0,
                    token_offset=0,
                    ids=_ids(outputs),
                )
                for n in names
            )
        ),
        1.0,
    )
    return core, more


def _detokenizer(requests: int, outputs: int) -> Made:
    folder, names = demo_path(), _names(requests)
    core = DetokenizerCore(DecoderFactory(load_tokenizer(folder, read_tokenizer_config(folder))))
    for name in names:
        core.handle(
            Open(request_id=name, attempt=1, gateway=0, params=PARAMS, context_ids=b""), 1.0
        )
        core.handle(Tokens((TokenRow(request_id=name, offset=0, ids=_ids(outputs)),)), 1.0)
    told = [outputs]

    def more() -> Message:
        told[0] += 1
        return Tokens(
            tuple(TokenRow(request_id=name, offset=told[0] - 1, ids=_ids(1)) for name in names)
        )

    return core, more


CORES: dict[str, Callable[[int, int], Made]] = {
    "scheduler": _scheduler,
    "gateway": _gateway,
    "detokenizer": _detokenizer,
}

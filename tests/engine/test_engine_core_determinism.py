"""Two ranks that hear the same plans decide the same, whenever their steps end."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hash_device import HashDevice
from pipeinfer.engine.core import Compute, EngineCore
from pipeinfer.engine.executor import step_done
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import PROTOCOL, Admit, BeginEpoch, Hello, Message, Plan, Release, Result
from pipeinfer.params import RequestParams
from pipeinfer.step import Sampled, Step
from pipeinfer.wire import pack

PAGES, SIZE, SLOTS, LIMIT = 15, 4, 4, 40


def random_plans(seed: int, count: int) -> list[Plan]:
    """Plans that fit together, with shared prefixes, releases and too little memory."""
    rng = np.random.default_rng(seed)
    used: set[int] = set()
    plans = []
    for number in range(count):
        releases = [slot for slot in sorted(used) if rng.random() < 0.15]
        used -= set(releases)
        admits = [slot for slot in range(SLOTS) if slot not in used and rng.random() < 0.5]
        used |= set(admits)
        rows = rng.permutation(SLOTS)[: rng.integers(0, SLOTS + 1)]
        plans.append(
            Plan(
                1,
                number,
                tuple(Release(slot, bool(rng.random() < 0.8)) for slot in releases),
                tuple(random_admit(rng, slot) for slot in admits),
                pack(rows),
                pack(rng.choice([1, 1, 3, 50], len(rows))),
            )
        )
    return plans


def random_admit(rng: np.random.Generator, slot: int) -> Admit:
    tokens = [int(rng.integers(0, 2))] * int(rng.integers(1, 30))
    salt = str(rng.integers(0, 2))
    return Admit(slot, "r", pack(tokens), len(tokens), LIMIT, RequestParams(), 1, (), salt)


class Rank:
    def __init__(self) -> None:
        hello = Hello(PROTOCOL, "0", 0, 1, 7, "m", SIZE, PAGES - 1, SLOTS, LIMIT, "torch")
        self.core = EngineCore(hello, "s", MemoryManager(PAGES, SIZE, SLOTS, LIMIT))
        self.device = HashDevice(PAGES, SIZE, SLOTS)
        self.queue: list[Step] = []
        self.said: list[Message] = []
        self.steps: list[Step] = []
        self.handle(BeginEpoch(1, (7,)))

    def handle(self, event: Message) -> None:
        for send in self.core.handle(event, 0.0):
            if isinstance(send.message, Compute):
                self.queue.append(send.message.step)
                self.steps.append(send.message.step)
            else:
                self.said.append(send.message)

    def work(self, steps: int) -> None:
        for step in self.queue[:steps]:
            self.handle(step_done(step, Sampled.one_each(self.device.run(step))))
        del self.queue[:steps]

    def results(self) -> list[Result]:
        return [message for message in self.said if isinstance(message, Result)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_ranks_decide_the_same_whenever_results_arrive(seed: int, delays: list[int]):
    prompt, late = Rank(), Rank()
    for plan, delay in zip(random_plans(seed, 40), delays, strict=True):
        prompt.handle(plan)
        prompt.work(99)
        late.handle(plan)
        late.work(delay)
    late.work(99)
    assert [result.number for result in late.results()] == list(range(40))
    assert late.results() == prompt.results()
    for one, other in zip(prompt.steps, late.steps, strict=True):
        for name in ("slots", "starts", "counts", "samples", "tokens"):
            assert (getattr(one, name) == getattr(other, name)).all()
        for name in ("slots", "columns", "pages", "admitted", "pages_to_zero"):
            assert np.array_equal(getattr(one.delta, name), getattr(other.delta, name))


def digests() -> list[int]:
    rank = Rank()
    for plan in random_plans(5, 60):
        rank.handle(plan)
        rank.work(99)
    return [result.digest for result in rank.results()]


def test_decisions_do_not_depend_on_the_process():
    """String hashes and object addresses differ between processes; digests must not."""
    code = "import test_engine_core_determinism as t; print(t.digests())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert said == {str(digests())}


def test_memory_and_engine_core_do_not_import_torch():
    code = (
        "import sys, pipeinfer.engine.core, pipeinfer.memory.prefix_cache; "
        "print([name for name in sys.modules if name in ('torch', 'transformers', 'zmq')])"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, check=True, capture_output=True, timeout=60).stdout == b"[]\n"

"""An engine that sleeps: when it may, what it gives back, and that all is there again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import make_checkpoint
from memory_holders import running_holder
from pipeinfer.core import LOCAL, StepDone, Tick
from pipeinfer.engine.core import (
    Compute,
    DeviceError,
    EngineCore,
    FindPages,
    FoundPages,
    Resume,
    Resumed,
    Suspend,
    Suspended,
)
from pipeinfer.engine.device_memory import HostMemory
from pipeinfer.engine.sleeping import GpuWeights
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.memory.page_directory import ChainTracker, PageChains
from pipeinfer.messages import PROTOCOL, Asleep, BeginEpoch, Hello, Plan, Ready, Sleep
from pipeinfer.runtime.memory_holder import HolderLink

ME, PAGES, SIZE, SLOTS = 7, 6, 4, 2


@pytest.fixture(scope="module", autouse=True)
def what_was_there_is_no_garbage():
    """Each nap looks for some, two hundred times here; in a worker with transformers loaded that
    would take half a minute."""
    gc.collect()
    gc.freeze()


class Engine:
    """A core whose device does what it is told when `work` is called."""

    def __init__(self) -> None:
        hello = Hello(PROTOCOL, "0", 0, 1, ME, "m", SIZE, PAGES - 1, SLOTS, 20, "torch")
        memory = MemoryManager(PAGES, SIZE, SLOTS, 20, chains=ChainTracker(PAGES, SIZE, SLOTS))
        self.core = EngineCore(hello, "scheduler-0", memory)
        self.todo: deque[Suspend | Resume] = deque()
        self.has_memory = True
        self.epoch = 0

    def feed(self, event) -> list:
        said = []
        for channel, _, message in self.core.handle(event, 0.0):
            if channel != LOCAL:
                said.append(message)
                continue
            match message:
                case Suspend() | Resume():
                    self.todo.append(message)
                    assert len(self.todo) == 1, "it does one thing at a time"
                    self.has_memory = False
                case FindPages():
                    said += self.feed(FoundPages.of(PageChains.none(SIZE)))
                case Compute():
                    assert self.has_memory
        return said

    def work(self) -> list:
        match self.todo.popleft():
            case Suspend(level, refuses):
                return self.feed(Suspended(level, refuses=refuses))
            case Resume():
                self.has_memory = True
                return self.feed(Resumed())

    def begin(self) -> list:
        """As a scheduler, until the epoch runs."""
        self.epoch += 1
        said = self.feed(BeginEpoch(self.epoch, (ME,)))
        while not said:
            said = self.work() or self.feed(BeginEpoch(self.epoch, (ME,)))
        return said


def test_it_answers_when_its_device_has_done_it_and_as_often_as_it_is_asked():
    engine = Engine()
    assert [type(one) for one in engine.begin()] == [Ready]
    assert engine.feed(Sleep(1, (ME,))) == engine.feed(Sleep(1, (ME,))) == []
    assert engine.core.state()[0] == "waiting"
    assert engine.work() == engine.feed(Sleep(1, (ME,))) == [Asleep(1, 0, ME)]
    assert engine.core.state() == ("asleep", "level 1") and engine.feed(Tick()) == []
    assert engine.feed(Sleep(2, (ME,))) == []
    assert engine.work() == engine.feed(Sleep(1, (ME,))) == [Asleep(2, 0, ME)]


def test_it_wakes_before_its_next_epoch_begins():
    engine = Engine()
    engine.feed(Sleep(2, (ME,)))
    engine.work()
    assert engine.feed(BeginEpoch(1, (ME,))) == engine.feed(BeginEpoch(1, (ME,))) == []
    assert engine.core.state() == ("asleep", "wakes up")
    assert engine.work() == []
    assert engine.feed(BeginEpoch(1, (ME,))) == [Ready(1, 0, ME)]


def test_steps_of_the_epoch_before_say_nothing_and_plans_are_dropped():
    engine = Engine()
    engine.begin()
    engine.feed(Plan(1, 0, (), (), b"", b""))
    engine.feed(Sleep(1, (ME,)))
    assert engine.feed(Plan(1, 1, (), (), b"", b"")) == []
    assert engine.feed(StepDone(1, 0, b"", b"")) == []


def test_others_sleep_without_it():
    engine = Engine()
    engine.begin()
    assert engine.feed(Sleep(1, (ME + 1,))) == [] and not engine.todo
    assert engine.core.state()[0] == "ready"


def test_the_next_scheduler_hears_at_which_level_it_sleeps():
    engine = Engine()
    engine.feed(Sleep(2, (ME,), refuses=True))
    engine.work()
    assert engine.feed(Tick()) == []
    engine.feed(BeginEpoch(9, ()))
    [hello] = engine.feed(Tick())
    assert (hello.sleep_level, hello.refuses) == (2, True) and not engine.todo
    engine.feed(Sleep(2, (ME,), refuses=True))
    assert engine.feed(Tick()) == []
    engine.begin()
    engine.feed(BeginEpoch(10, ()))
    [hello] = engine.feed(Tick())
    assert hello.sleep_level == 0


def test_who_asks_again_otherwise_is_heard_and_no_sleep_gets_lighter():
    engine = Engine()
    engine.feed(Sleep(2, (ME,)))
    engine.work()
    assert engine.feed(Sleep(1, (ME,), refuses=True)) == []
    assert engine.todo[0] == Suspend(2, True)
    assert engine.work() == engine.feed(Sleep(1, (ME,), refuses=True)) == [Asleep(2, 0, ME, True)]


def test_an_engine_whose_predecessor_slept_says_so_and_is_woken_as_that_one():
    engine = Engine()
    engine.has_memory = False
    assert engine.feed(Suspended(2, refuses=True)) == []
    [hello] = engine.feed(Tick())
    assert (hello.sleep_level, hello.refuses) == (2, True)
    asleep = Asleep(2, 0, ME, refuses=True)
    assert engine.feed(Sleep(2, (ME,), refuses=True)) == [asleep] and not engine.todo
    assert engine.begin() == [Ready(1, 0, ME)] and engine.has_memory


@pytest.mark.parametrize("done", [Suspended(1, "no memory"), Resumed("no memory")])
def test_a_device_that_cannot_ends_the_process(done):
    with pytest.raises(DeviceError, match="no memory"):
        Engine().feed(done)


WORDS = st.sampled_from(["sleep 1", "sleep 2", "refuse 1", "begin", "other", "work", "tick"])


@given(st.lists(WORDS, max_size=40))
def test_whatever_comes_in_whatever_order_no_epoch_runs_without_memory(words):
    engine = Engine()
    for word in words:
        match word.split():
            case ["sleep", level]:
                engine.feed(Sleep(int(level), (ME,)))
            case ["refuse", level]:
                engine.feed(Sleep(int(level), (ME,), refuses=True))
            case ["begin"]:
                engine.feed(BeginEpoch(1, (ME,)))
            case ["other"]:
                engine.feed(BeginEpoch(1, ()))
            case ["work"]:
                if engine.todo:
                    engine.work()
            case _:
                engine.feed(Tick())
        assert engine.core.state()[0] != "ready" or engine.has_memory
        assert engine.core.state()[0] != "asleep" or not engine.has_memory
    while engine.todo:
        engine.work()
    assert engine.begin() == [Ready(engine.epoch, 0, ME)] and engine.has_memory


# ------------------------------------------------------------------------------ memory of a host

# At each level: prints resident MiB awake and asleep and those of the pool, then whether the same
# logits come again, and whether the pool has any number but 0.
SLEEPER = """
import sys
from pathlib import Path
import torch
from pipeinfer.engine.kept_memory import KeptMemory
from pipeinfer.engine.loading import load_engine
from pipeinfer.processes import return_freed_memory
from pipeinfer.settings import Settings

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

kept = KeptMemory(sys.argv[1])
settings = Settings(kv_pages=4000, max_running=2, threads=1)
engine = load_engine(settings, Path(sys.argv[2]), kept=lambda: kept)
runner, pool = engine.runner, kept.opened.memory
hidden = torch.ones(3, int(sys.argv[3]), dtype=runner.pool.dtype)
for level in (1, 2):
    pool.array[:] = 1
    return_freed_memory()
    before, awake = runner._model.logits(hidden).clone(), resident()
    engine.memory.withdraw()
    engine.memory.give_back(level)
    print(awake, resident(), len(pool.array) >> 20, flush=True)
    sys.stdin.readline()
    engine.memory.take_back()
    engine.memory.keep()
    print(torch.equal(runner._model.logits(hidden), before), bool(pool.array.any()), flush=True)
    sys.stdin.readline()
"""


HIDDEN = 1024


def test_a_host_gives_back_pages_and_at_level_2_weights(tmp_path):
    folder = make_checkpoint(
        tmp_path, "Qwen3ForCausalLM", hidden_size=HIDDEN, intermediate_size=4096, vocab_size=4096
    )
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) >> 20
    assert weights > 60
    with running_holder() as address:
        process = subprocess.Popen(
            [sys.executable, "-c", SLEEPER, address, str(folder), str(HIDDEN)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        for level in (1, 2):
            awake, asleep, pool = map(int, process.stdout.readline().split())
            print(f"level {level}: {awake} MiB awake, {asleep} asleep; {pool} of pages, {weights}")
            assert awake - asleep >= 0.8 * (pool + weights * (level == 2))
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "True False\n"
            if level == 1:
                process.stdin.write("\n")
                process.stdin.flush()
        process.kill()
        process.communicate()
        attached, _ = HolderLink(address, 60).attach()
        assert {"pool", "directory"} <= {entry.name for entry in attached.entries}


# ------------------------------------------------------------------------------- weights of a GPU


class PretendedGpu:
    """Memory of a GPU as a CudaMemory has it, on a host."""

    def __init__(self, numbers: bytes) -> None:
        self.data = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)
        self.descriptor, self.writable, self.there = 3, False, True

    def zero_pages(self, pool, pages) -> None: ...

    def give_back(self) -> None:
        assert self.there
        self.there = False
        self.data.fill_(255)

    def take_back(self) -> None:
        assert not self.there
        self.there = self.writable = True
        self.data.zero_()

    def protect(self, *, writable: bool) -> None:
        assert self.there
        self.writable = writable


class Copied:
    open = 0

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data.clone()
        Copied.open += 1

    def close(self) -> None:
        Copied.open -= 1


@given(st.lists(st.sampled_from([[1], [2], [1, 2], [1, 1], [2, 1]]), max_size=4))
def test_weights_of_a_gpu_are_as_they_were_after_any_sleep(naps):
    numbers = bytes(range(64))
    memory, filled = PretendedGpu(numbers), []

    def fill(data: torch.Tensor) -> None:
        assert memory.writable and data is memory.data
        data.copy_(torch.frombuffer(bytearray(numbers), dtype=torch.uint8))
        filled.append(True)

    Copied.open = 0
    weights = GpuWeights("weights", memory, fill, Copied)
    for levels in naps:
        filled.clear()
        for level in levels:
            weights.give_back(level)
            assert Copied.open == (max(levels[: levels.index(level) + 1]) == 1)
        weights.take_back()
        assert memory.there and not memory.writable and Copied.open == 0
        assert bytes(memory.data.tolist()) == numbers
        assert filled == [True] * (max(levels) == 2)


def test_memory_of_a_host_that_was_given_back_is_zero_and_takes_none():
    memory = HostMemory(64 << 20)
    memory.array[:] = 7
    memory.give_back()
    assert memory_of(memory) == 0
    memory.take_back()
    memory.array[:4096] = np.uint8(1)
    assert memory_of(memory) == 4096
    assert not memory.array[4096:].any()


def memory_of(memory: HostMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512

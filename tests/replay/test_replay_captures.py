"""A replayed engine has each CUDA graph from the same step on as the recorded one had."""

from __future__ import annotations

import msgspec
import pytest

from pipeinfer.core import LOCAL, GraphDue
from pipeinfer.engine import executor
from pipeinfer.engine.core import Capture, EngineCore
from pipeinfer.engine.device import HostDevice
from pipeinfer.engine.executor import BackgroundCapture, DeviceDriver, Executor
from pipeinfer.engine.profiling import Phases
from pipeinfer.memory.manager import MemoryManager
from pipeinfer.messages import PROTOCOL, Hello
from pipeinfer.replay.run import CorePlayer, DevicePlayback, ReplayCounts, ReplayPace
from pipeinfer.replay.traces import TraceEntry, TraceExchange, ignored_fields
from pipeinfer.trace.format import Record, RecordDecoder


class Runner:
    """Has graphs to capture, and no steps."""

    def __init__(self, left: int) -> None:
        self.device, self.graphs, self.graphs_deferred = HostDevice(), 2, left

    def capture_next(self):
        def work() -> None:
            self.graphs, self.graphs_deferred = self.graphs + 1, self.graphs_deferred - 1

        return self.device.submit(work)

    def stop_capturing(self) -> None:
        self.graphs_deferred = 0


def core() -> EngineCore:
    hello = Hello(
        protocol=PROTOCOL, version="test", rank=0, tp=1, incarnation=1, model="model", page_size=16,
        pages=8, max_slots=2, max_model_len=64, attention="torch",
    )  # fmt: skip
    return EngineCore(hello, "scheduler-0", MemoryManager(9, 16, 2, 64))


def entry(seq: int, direction, message) -> TraceEntry:
    return TraceEntry(seq, seq / 50, direction, LOCAL, "", seq, 0.0, message, 1)


def recorded() -> list[TraceExchange]:
    """Two graphs became due, one after the other."""
    return [
        TraceExchange(entry(seq, "in", GraphDue()), [entry(seq + 1, "out", Capture())])
        for seq in (1, 3)
    ]


@pytest.mark.parametrize("left", [5, 1])
async def test_graphs_are_captured_where_the_recording_says_so_and_nowhere_else(monkeypatch, left):
    for name in ("FIRST", "QUIET", "GAP"):
        monkeypatch.setattr(executor, name, 0.0)  # the engine's own wish comes at once
    runner, tally = Runner(left), ReplayCounts()
    driver = DeviceDriver(
        lambda *reports: Executor(runner, *reports), Phases(), background=BackgroundCapture(runner)
    )
    played = core()
    device = DevicePlayback(driver, tally, played.hello)
    await device.play(
        CorePlayer(played, ignored_fields, device.deliver), recorded(), ReplayPace(True, 0.0)
    )
    assert tally.first is None
    assert (runner.graphs, runner.graphs_deferred) == (2 + min(left, 2), max(left - 2, 0))


@pytest.mark.parametrize(("direction", "message"), [("in", GraphDue()), ("out", Capture())])
def test_a_recording_holds_when_graphs_are_due(direction, message):
    record = Record(0.0, direction, LOCAL, "", 0, 0.0, msgspec.msgpack.encode(message))
    assert RecordDecoder("engine").decode(record) == message

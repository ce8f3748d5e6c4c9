"""When a stage's loop hands over what it has recorded."""

from __future__ import annotations

import asyncio

import pytest

from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import StepDone, Tick
from pipeinfer.messages import PROTOCOL
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, local
from pipeinfer.trace import hook as taps


class Core:
    """Nothing is asked of it before there is a snapshot to make."""


async def tapped(rows: int) -> int:
    """Rows that were not handed over while the loop had all the time that it needs for many."""
    settings = Settings()
    identity = Identity("tokenizer", 0, 0, 0)
    tap = taps.RecorderHook(settings, local(settings, "ipc:///nowhere"), identity, 1, print, print)
    tap.begin(Core(), {})  # type: ignore[arg-type]
    for _ in range(rows):
        tap.add((0.0, "note", "local", "", 0, 0.0, b""))
    for _ in range(200):
        if not tap._recorder.waiting:
            break
        await asyncio.sleep(taps.CHECK_SECONDS / 10)
    return tap._recorder.waiting


@pytest.mark.parametrize(("rows", "left"), [(taps.MAX_WAITING_ROWS, 0), (10, 10)])
def test_many_rows_are_not_packed_at_once(rows, left, monkeypatch):
    monkeypatch.setattr(taps, "FLUSH_SECONDS", 1e6)
    assert asyncio.run(tapped(rows)) == left


class Idle(Core):
    def __init__(self) -> None:
        self.busy = False

    def idle(self) -> bool:
        return not self.busy


async def test_an_engines_large_state_is_taken_only_while_nothing_happens_to_it():
    settings, core = Settings(), Idle()
    identity = Identity("engine", 0, 0, 0)
    tap = taps.RecorderHook(settings, local(settings, "ipc:///nowhere"), identity, 1, print, print)
    tap.begin(core, {})  # type: ignore[arg-type]
    header = FrameHeader(PROTOCOL, "scheduler-0", 1, 1, 0.0)
    tap.frame(10.0, "plan", header, b"")
    assert not tap._quiet(10.0) and not tap._quiet(10.0 + taps.QUIET_SECONDS / 2)
    assert tap._quiet(10.0 + taps.QUIET_SECONDS)
    still = tap._unchanged_check(11.0)
    assert still is not None and still()
    tap.event(11.1, Tick())
    assert still() and tap._quiet(11.2), "a tick does nothing to an engine that does nothing"
    tap.event(11.3, StepDone(1, 1, b"", b""))
    assert not still() and not tap._quiet(11.4)
    core.busy = True
    assert not tap._quiet(99.0)
    busy = tap._unchanged_check(99.0)
    assert busy is not None and not busy()
    tap.close()


@pytest.mark.parametrize("mib", [0, 1])
async def test_a_stage_that_dies_writes_its_flight_unless_that_is_switched_off(mib, tmp_path):
    settings = Settings(flight_dir=str(tmp_path / "flights"), flight_recorder_mib=mib)
    identity, topology = Identity("tokenizer", 0, 0, 0), local(settings, "ipc:///nowhere")
    tap = taps.RecorderHook(settings, topology, identity, 1, print, print)
    tap.begin(Core(), {})  # type: ignore[arg-type]
    tap.event(1.0, Tick())
    tap.crashed(ArithmeticError("a planted fault"))
    tap.close()
    assert len(list(tmp_path.glob("flights/*.pitrace"))) == mib

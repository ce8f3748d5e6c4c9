"""A large state is copied by another process: exactly as it was, whatever becomes of that one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipeinfer.control import StartRecording
from pipeinfer.core import Tick
from pipeinfer.messages import PROTOCOL, Abort, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.recovery import REMEMBERED_SECONDS
from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, local
from pipeinfer.trace import format as form
from pipeinfer.trace import snapshot as state_snapshots
from pipeinfer.trace.format import ModelIdentity, Trace, TraceHeader
from pipeinfer.trace.hook import RecorderHook
from pipeinfer.trace.recorder import FlightRing, Recorder
from pipeinfer.trace.snapshot import (
    MAX_WALKED_VALUES,
    StateCopier,
    StateCopyFailed,
    TooLarge,
    Unsnapshottable,
    _Walker,
    restore,
    snapshot,
)
from pipeinfer.wire import pack
from waiting import until

OPTIONS = SchedulerOptions("mixed", 2, 64, 512)
HEADER = TraceHeader(protocol=PROTOCOL, version="test", stage="scheduler-0", name="scheduler")


def never() -> bool:
    return False


def work(number: int) -> TokenizedRequest:
    return TokenizedRequest(
        f"r{number}", 1, 0, 0, pack(range(300)), RequestParams(max_tokens=9), number
    )


def core_of(requests: int, outputs: int = 10) -> SchedulerCore:
    core = SchedulerCore(OPTIONS)
    for number in range(requests):
        core.handle(work(number), 1.0)
        core._live[f"r{number}"].outputs.extend(range(outputs))
    return core


def all_children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def children() -> Callable[[], set[str]]:
    """Those that a test has left; the servers of other tests may still run."""
    others = all_children()
    return lambda: all_children() - others


@pytest.fixture
def only_elsewhere(monkeypatch):
    """A walk without a bound in this process raises; a forked one inherits the rule."""
    mine = os.getpid()

    def elsewhere(core, most=0):
        assert os.getpid() != mine or most, "the whole state was walked where the loop is"
        return snapshot(core, most)

    monkeypatch.setattr(state_snapshots, "snapshot", elsewhere)


def test_a_large_state_is_walked_in_another_process_and_is_that_of_the_moment(
    only_elsewhere, children
):
    core = core_of(3_000, 100)
    expected, copier = snapshot(core), StateCopier(forks=True)
    copied = copier.take(core)
    core.handle(Abort("r7", 1), 2.0)  # what comes after is not in it
    core._live["r8"].outputs.extend(range(1_000))
    state = form.unpack_state(copied.packed(never))
    assert state == expected != snapshot(core)
    again = SchedulerCore(OPTIONS)
    restore(again, state)
    assert len(again._live) == 3_000 and len(again._live["r8"].outputs) == 100
    assert not children()


def test_a_small_state_needs_no_process_and_where_none_may_be_forked_there_is_none(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    for copier, core in ((StateCopier(True), core_of(1)), (StateCopier(False), core_of(1_000))):
        assert form.unpack_state(copier.take(core).packed(never)) == snapshot(core)


def test_whether_a_state_is_small_is_found_out_in_the_time_that_a_small_one_takes(monkeypatch):
    walked: list[object] = []
    node = _Walker._node
    monkeypatch.setattr(_Walker, "_node", lambda self, one: walked.append(one) or node(self, one))
    core = core_of(5_000)
    with pytest.raises(TooLarge):
        snapshot(core, MAX_WALKED_VALUES)
    assert len(walked) <= MAX_WALKED_VALUES
    with pytest.raises(TooLarge):  # one container: it is not looked into
        _Walker({}, MAX_WALKED_VALUES)._node([0] * (MAX_WALKED_VALUES + 1))


def test_a_state_that_shrank_is_walked_at_once_again():
    core, copier = core_of(3_000), StateCopier(forks=True)
    copier.take(core).packed(never)
    assert not copier.small
    for number in range(2_999):
        core.handle(Abort(f"r{number}", 1), 2.0)
    core.handle(
        Abort("r2999", 1), 2.0 + REMEMBERED_SECONDS
    )  # and no id of those is remembered any more
    copier._learn(0.0)  # as the last copy of a small state says
    assert not isinstance(copier.take(core), state_snapshots._Elsewhere)


def test_where_none_may_be_forked_a_large_state_is_walked_by_who_packs_it(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    core, copier, walks = core_of(3_000, 100), StateCopier(forks=False), []

    def counted(core, most=0):
        walks.append(most)
        return snapshot(core, most)

    monkeypatch.setattr(state_snapshots, "snapshot", counted)
    copied = copier.take(core, lambda: True)
    assert walks == [MAX_WALKED_VALUES], "no more than a small one takes, on the loop"
    assert form.unpack_state(copied.packed(never)) == snapshot(core)
    assert walks == [MAX_WALKED_VALUES, 0] and not copier.small
    with pytest.raises(StateCopyFailed, match="busy"):
        copier.take(core, lambda: False)
    assert walks == [MAX_WALKED_VALUES, 0]


@pytest.mark.parametrize("raises", [False, True])
def test_a_state_that_changed_while_it_was_walked_is_lost(raises, monkeypatch):
    core, copier, still = core_of(3_000), StateCopier(forks=False), [True]

    def disturbed(core, most=0):
        if most:
            raise TooLarge
        still[0] = False
        if raises:
            raise RuntimeError("dictionary changed size during iteration")
        return b"torn"

    monkeypatch.setattr(state_snapshots, "snapshot", disturbed)
    copied = copier.take(core, lambda: still[0])
    with pytest.raises(StateCopyFailed, match="went on"):
        copied.packed(never)


def slowly(core, most=0):
    if most:
        raise TooLarge
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_for_the_copy_is_not_told_to_the_stage(number, monkeypatch, children):
    """Both have the descriptor that wakes the loop for a signal."""
    monkeypatch.setattr(state_snapshots, "snapshot", slowly)
    heard: list[int] = []
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, heard.append, number)
    copied = StateCopier(forks=True).take(core_of(1))
    os.kill(copied.pid, number)
    await asyncio.sleep(0.05)
    with pytest.raises(StateCopyFailed, match="nobody wants it"):
        copied.packed(lambda: True)
    assert heard == [] and not children()
    os.kill(os.getpid(), number)  # what is meant for the stage still reaches it
    await until(lambda: heard == [number])
    loop.remove_signal_handler(number)


def test_the_copy_holds_none_of_our_sockets(monkeypatch):
    monkeypatch.setattr(state_snapshots, "snapshot", slowly)
    reading, writing = os.pipe()
    copied = StateCopier(forks=True).take(core_of(1))
    os.close(writing)
    # At its end only when nobody has the other end open: a client would see its connection end.
    assert os.read(reading, 1) == b""
    os.close(reading)
    with pytest.raises(StateCopyFailed):
        copied.packed(lambda: True)


def test_a_copy_that_is_killed_or_takes_too_long_is_no_state(monkeypatch, children):
    monkeypatch.setattr(state_snapshots, "snapshot", slowly)
    copied = StateCopier(forks=True).take(core_of(1))
    os.kill(copied.pid, signal.SIGKILL)
    with pytest.raises(StateCopyFailed, match="killed"):
        copied.packed(never)
    monkeypatch.setattr(state_snapshots, "COPY_TIMEOUT", 0.05)
    monkeypatch.setattr(state_snapshots, "POLL_SECONDS", 0.01)
    with pytest.raises(StateCopyFailed, match=r"more than 0\.05 s"):
        StateCopier(forks=True).take(core_of(1)).packed(never)
    assert not children()


def test_what_cannot_be_written_down_is_said_by_the_copy_too():
    core = core_of(3_000)
    core._live["r2999"].stops = threading.Lock()
    with pytest.raises(Unsnapshottable, match="lock is part of the state"):
        StateCopier(forks=True).take(core).packed(never)


def test_without_a_state_the_flight_recorder_goes_on_with_the_one_before(tmp_path, monkeypatch):
    """No process can be forked, or the copy is killed: what was kept still replays."""
    ring = FlightRing(1 << 20)
    recorder = Recorder("s", ModelIdentity, ring)
    recorder.begin_segment(HEADER, 0.0)
    row = (0.0, "in", "local", "", 0, 0.0, msgspec.msgpack.encode(Tick()))
    core, copier = core_of(3_000), StateCopier(forks=True)
    copier.small = False

    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", refuse)
        with pytest.raises(StateCopyFailed, match="Resource temporarily unavailable"):
            copier.take(core)
    recorder.add(row)
    recorder.flush(40.0)
    copied = copier.take(core)
    os.kill(copied.pid, signal.SIGKILL)
    recorder.begin_segment(HEADER, 40.0, copied)
    recorder.add(row)
    recorder.flush(41.0)
    deadline = time.monotonic() + 60
    while recorder._segment_requested:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    recorder.dump([tmp_path], "a test")
    recorder.close("")
    assert len(ring._segments) == 1 and not recorder._segment_requested
    assert not recorder.needs_segment(41.0) and recorder._not_before > 41.0
    flight = Trace(next(tmp_path.glob("*.pitrace")))
    assert flight.header.snapshot is None and len(list(flight)) == 2


async def test_a_recording_by_hand_takes_its_state_elsewhere_and_begins_there(
    only_elsewhere, tmp_path, monkeypatch
):
    answers: list = []
    settings = Settings()
    tap = RecorderHook(
        settings, local(settings, "ipc:///nowhere"), Identity("scheduler"), 1, answers.append,
        print, forks=True,
    )  # fmt: skip
    core = core_of(3_000)
    tap.begin(core, {})
    tap.event(1.0, Abort("before", 1))
    at_that_moment = snapshot(core)
    tap.control(StartRecording("mine", str(tmp_path)))
    for number in range(5):
        event = Abort(f"r{number}", 1)
        tap.event(2.0, event)
        core.handle(event, 2.0)
    await until(lambda: answers)
    assert answers[0].state == "recording"
    tap.close()
    trace = Trace(next(tmp_path.glob("*.pitrace")))
    assert trace.header.snapshot == at_that_moment
    bodies = [msgspec.msgpack.decode(r.body)[1] for r in trace if r.direction == "in"]
    assert bodies == ["r0", "r1", "r2", "r3", "r4"]


def test_a_header_with_a_large_state_is_packed_as_any_other(monkeypatch):
    header = msgspec.structs.replace(HEADER, snapshot=os.urandom(10_000), error="at the end")
    usual = form.pack_header(header)
    monkeypatch.setattr(form, "LARGE_STATE", 5_000)
    other = form.pack_header(header)
    start = len(form.MAGIC) + form.PREFIX.size
    assert form.unpack_header(other[start:], None) == form.unpack_header(usual[start:], None)
    assert form.unpack_header(other[start:], None) == header

"""The flight recorder: always the last minute, bounded, replayable, written when a stage dies."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest
from rebuilt import events, fresh, outputs

from pipeinfer.messages import BeginEpoch, Plan
from pipeinfer.runtime.stage import StageContext, builder
from pipeinfer.settings import Settings
from pipeinfer.topology import NAMES, Identity, StageEntry, Topology
from pipeinfer.trace import format as form
from pipeinfer.trace.format import Crash, ModelIdentity, Trace, TraceHeader
from pipeinfer.trace.recorder import MINUTE, SEGMENT, FlightRing, Recorder
from pipeinfer.trace.snapshot import StateCopier, restore
from servers import STAGES, Server

HEADER = TraceHeader(protocol=2, version="test", stage="s", name="scheduler", reason="flight")
BLOCK = form.pack_records([(0.0, "in", "work", "p", 0, 0.0, bytes(range(250)))])


def test_the_last_minute_is_there_and_what_is_older_goes():
    ring = FlightRing(1 << 30)
    begun = []
    for second in range(300):
        if ring.needs_segment(second):
            begun.append(second)
            ring.begin(HEADER, second, form.pack_state(b"%d" % second))
        ring.add(BLOCK, second)
        first = int(form.unpack_header(ring.file("")[0][16:], None).snapshot or b"0")
        assert first <= max(second - MINUTE, 0)
        assert second - first <= MINUTE + 2 * SEGMENT
    assert begun == list(range(0, 300, int(SEGMENT)))


def test_memory_is_bounded_however_much_happens():
    ring = FlightRing(20 * len(BLOCK))
    for moment in range(500):
        if ring.needs_segment(0.001 * moment):
            ring.begin(HEADER, 0.001 * moment, form.pack_state(b"state"))
        ring.add(BLOCK, 0.001 * moment)
        assert ring.bytes <= 20 * len(BLOCK)
    assert ring.bytes > 15 * len(BLOCK)
    assert sum(map(len, ring.file("")[1:])) <= ring.bytes


def test_an_engine_keeps_its_epoch_as_long_as_it_fits():
    ring = FlightRing(1 << 20, keep_all=True)
    ring.begin(HEADER, 0.0)
    for second in range(1_000):
        assert not ring.needs_segment(second, undisturbed=True)
        ring.add(b"x" * 100, second)
    assert len(ring.file("")) == 1_001


def test_an_engine_that_is_always_busy_loses_the_beginning_and_not_its_loop_or_its_memory():
    ring, budget = FlightRing(20 * len(BLOCK), keep_all=True), 20 * len(BLOCK)
    ring.begin(HEADER, 0.0, form.pack_state(b"state"))
    for moment in range(100):
        assert not ring.needs_segment(moment), "no state is taken of it"
        ring.add(BLOCK, moment)
        assert ring.bytes <= budget
    parts = ring.file("an error")
    header = form.unpack_header(parts[0][16:], None)
    assert header.broken and header.snapshot is None and header.error == "an error"
    assert 13 <= len(parts[1:]) <= 20 and set(parts[1:]) == {BLOCK}
    assert ring.needs_segment(101, undisturbed=True)
    ring.begin(HEADER, 101, form.pack_state(b"later"))
    ring.add(BLOCK, 102)
    header, *blocks = ring.file("")
    assert form.unpack_header(header[16:], None).snapshot == b"later" and blocks == [BLOCK]
    assert not form.unpack_header(header[16:], None).broken


def settle(recorder: Recorder, now: float) -> None:
    """Flushes, and waits until the thread has packed it: a test has no time to pass."""
    recorder.flush(now)
    deadline = time.monotonic() + 60
    while recorder._given != recorder._done:
        assert time.monotonic() < deadline
        time.sleep(0)


def test_a_stage_that_does_nothing_is_not_asked_for_its_state_again_and_again():
    """Its segments go on until there is more in them than in a state, or they are too long."""
    ring = FlightRing(1 << 30)
    ring.begin(HEADER, 0.0, os.urandom(10 * len(BLOCK)))
    seconds = 0.0
    while not ring.needs_segment(seconds):
        seconds += SEGMENT
        ring.add(BLOCK, seconds)
    assert 9 <= seconds / SEGMENT <= 11


# A test's process may be large, and slow to fork: one stage is enough to see that the state is the
# same, and a larger ring, which begins fewer segments.
@pytest.mark.parametrize(
    ("stage", "forks"), [*((stage, False) for stage in STAGES), ("detokenizer", True)]
)
def test_whatever_the_ring_has_dropped_the_rest_replays(recorded, stage, forks, tmp_path):
    """A ring too small for the session: its file begins with a snapshot, and goes on from there."""
    trace = recorded[stage]
    raw = sum(len(record.body) for record in trace)
    restarts = stage == "engine"
    ring = FlightRing(max(raw // (2 if forks else 6), 1_000), keep_all=restarts)
    recorder = Recorder("s-0-0-1", ModelIdentity, ring, restarts=restarts)
    core, begun, now = fresh(trace), 0, 0.0
    copier = StateCopier(forks)
    copier.small = False  # were it left to itself, it would not fork for states of this size
    recorder.begin_segment(msgspec.structs.replace(trace.header, reason="flight"), now)
    for record in trace:
        if record.direction == "in":
            settle(recorder, now)
            if recorder.needs_segment(now, undisturbed=True):
                recorder.begin_segment(trace.header, now, copier.take(core))
                begun += 1
            core.handle(trace.message(record), record.time)
            now += 0.1
        recorder.add(msgspec.structs.astuple(record)[:7])
    settle(recorder, now)
    recorder.dump([tmp_path], "Nothing: it is a test")
    recorder.close("the end")
    assert begun > 2
    flight = Trace(next(tmp_path.glob("flight-*")))
    assert flight.header.snapshot is not None and flight.header.error == "Nothing: it is a test"
    assert 0 < len(list(flight)) < len(list(trace))
    again = fresh(trace)
    restore(again, flight.header.snapshot)
    for event, expected in events(flight):
        said = outputs(again, event)
        assert [type(m) for m in said] == [type(m) for m in expected]
        if stage != "engine":  # its results have durations in them
            assert said == expected


def test_an_engines_ring_can_begin_at_a_begin_without_a_snapshot(recorded, tmp_path):
    """Two epochs; a small ring has dropped what came before the second, and needs no state."""
    trace = recorded["engine"]
    rows = [msgspec.structs.astuple(record)[:7] for record in trace]
    ring = FlightRing(1 << 20, keep_all=True)
    recorder = Recorder("engine-0-0-1", ModelIdentity, ring, restarts=True)
    recorder.begin_segment(trace.header, 0.0)
    for row in rows + rows:
        recorder.add(row)
        recorder.flush(0.0)
    recorder.dump([tmp_path / "whole"], "")
    recorder.close("")
    count = sum(isinstance(e, BeginEpoch) for (_, e), _ in events(trace))
    assert len(ring._segments) == 1 + 2 * count
    ring._budget = ring._segments[-1].bytes
    ring._shrink(0.0)
    (tmp_path / "last.pitrace").write_bytes(b"".join(ring.file("")))
    last = Trace(tmp_path / "last.pitrace")
    (_, first), _ = events(last)[0]
    assert isinstance(first, BeginEpoch) and last.header.snapshot is None
    core = fresh(trace)
    for event, expected in events(last):
        assert [type(m) for m in outputs(core, event)] == [type(m) for m in expected]


def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes of a server, beside what they can import already."""
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{before}" if before else str(folder))


POLICY = """
from pathlib import Path
from pipeinfer.scheduler.policies import Mixed

class Crashing(Mixed):
    '''Fails once, at a step that has four rows.'''

    def compose(self, board):
        super().compose(board)
        flag = Path(__file__).with_name("crashed")
        if len(board.rows) >= 4 and not flag.exists():
            flag.touch()
            raise ArithmeticError("a planted fault")
"""


def test_a_stage_that_dies_leaves_a_flight_recording_that_dies_again(tmp_path, monkeypatch):
    (tmp_path / "crashing_policy.py").write_text(POLICY)
    importable(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    flights = tmp_path / "flights"
    arguments = ("--kv-pages", "200", "--threads", "1", "--policy", "crashing_policy:Crashing")
    with Server(*arguments, "--flight-dir", str(flights)) as server:
        body = {"prompt": ["count"] * 4, "max_tokens": 16, "ignore_eos": True}
        status, answer = server.post("/v1/completions", body)
        assert status == 200 and len(answer["choices"]) == 4, "the stage was started again"
        [file] = server.wait(lambda: list(flights.glob("flight-scheduler-*")), "a recording")
    trace = Trace(file)
    assert trace.header.error == "ArithmeticError: a planted fault"
    records = list(trace)
    assert trace.message(records[-1]) == Crash("ArithmeticError: a planted fault")
    assert any(isinstance(m, Plan) for _, out in events(trace) for m in out)
    (tmp_path / "crashed").unlink()
    settings = msgspec.convert(trace.header.settings, Settings)
    topology = Topology(tuple(StageEntry(name, f"inproc://{name}") for name in NAMES))
    who, incarnation = Identity("scheduler"), trace.header.incarnation
    context = StageContext(settings, topology, who, incarnation, lambda *_: None)
    core = builder("scheduler")(context).core
    *before, (last, _) = events(trace)
    for event, expected in before:
        assert outputs(core, event) == expected
    with pytest.raises(ArithmeticError, match="a planted fault"):
        outputs(core, last)

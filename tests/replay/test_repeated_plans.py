"""Recordings in which plans were published again: every plan counts once, whoever reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_replay_commands import header, rows

from pipeinfer.core import StepDone
from pipeinfer.messages import (
    PROTOCOL,
    Admit,
    BeginEpoch,
    Hello,
    Message,
    MissedPlan,
    Plan,
    Ready,
    Result,
)
from pipeinfer.params import RequestParams
from pipeinfer.replay.serve import EngineRole, Role, SchedulerRole
from pipeinfer.replay.timeline import build_timeline, request_times
from pipeinfer.replay.traces import LoadedTrace, Subjects, load
from pipeinfer.trace.format import pack_header, pack_records
from pipeinfer.wire import pack

ME = 7
HELLO = Hello(PROTOCOL, "0", 0, 1, ME, "m", 16, 9, 4, 64, "torch")
MISSED = MissedPlan(1, 0, 1)


def admit(slot: int, name: str) -> Admit:
    return Admit(slot, name, pack([1, 2]), 2, 9, RequestParams(), 0)


PLANS = [
    Plan(1, 0, (), (admit(0, "a"),), pack([0]), pack([2])),
    Plan(1, 1, (), (admit(1, "b"),), pack([0, 1]), pack([1, 2])),
    Plan(1, 2, (), (), pack([1]), pack([1])),
]
RESULTS = [
    Result(1, p.number, p.slots, *[p.counts] * 3, p.slots, b"", 5, 0, p.number) for p in PLANS
]


def recording(folder: Path, stage: str, *said: tuple[str, str, Message]) -> LoadedTrace:
    """Of (direction, channel, message), a second each."""
    path = folder / f"{stage}.pitrace"
    records = [rows(message, direction=way, channel=channel) for way, channel, message in said]
    numbered = [(at, *record[0][1:]) for at, record in enumerate(records, 1)]
    path.write_bytes(pack_header(header(stage=stage)) + pack_records(numbered))
    return load(path)


@pytest.fixture
def scheduler(tmp_path: Path) -> LoadedTrace:
    """Its rank misses plan 1, and says so behind plan 2."""
    out = [("out", "plan", plan) for plan in PLANS]
    hears = [("in", "result", result) for result in RESULTS]
    return recording(
        tmp_path, "scheduler-0", ("in", "result", HELLO), ("out", "plan", BeginEpoch(1, (ME,))),
        ("in", "result", Ready(1, 0, ME)), *out, hears[0], ("in", "result", MISSED), *out[1:],
        hears[1], *out[2:], hears[2], *out[2:],
    )  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> LoadedTrace:
    """The same from the other end."""
    hears = [("in", "plan", plan) for plan in PLANS]
    ends = [("in", "local", StepDone(1, n, pack([1]), pack([5]))) for n in range(3)]
    says = [("out", "result", result) for result in RESULTS]
    return recording(
        tmp_path, "engine-0-0", ("in", "plan", BeginEpoch(1, (ME,))), ("out", "result", HELLO),
        hears[0], hears[2], ("out", "result", MISSED), *hears, ends[0], says[0],
        ends[1], says[1], *hears, ends[2], says[2],
    )  # fmt: skip


def counted(trace: LoadedTrace) -> list[int]:
    return [e.message.number for e in trace.entries if e.kind == "Plan" and e.counts]


def test_each_plan_counts_once_where_it_was_applied(scheduler, engine):
    assert counted(scheduler) == counted(engine) == [0, 1, 2]
    assert all(entry.counts for entry in scheduler.entries if entry.kind != "Plan")


@pytest.mark.parametrize("stage", ["scheduler", "engine"])
def test_requests_and_steps_are_those_of_the_plans_that_count(stage, request):
    trace = request.getfixturevalue(stage)
    subjects, rows_of = Subjects(), {0: ("a",), 1: ("a", "b"), 2: ("b",)}
    for entry in trace.entries:
        about = subjects.of(entry)
        if entry.kind == "Plan" and entry.counts:
            assert set(about) == set(rows_of[entry.message.number])
    assert subjects.rows(1, 1) == {0: "a", 1: "b"}
    times = request_times([trace])
    point = {"scheduler": "admitted", "engine": "planned"}[stage]
    begun = [entry.time for entry in trace.entries if entry.kind == "Plan" and entry.counts]
    assert [times[name].first[point] for name in ("a", "b")] == begun[:2]
    assert all(times[name].latest[point] == times[name].first[point] for name in ("a", "b"))
    flights = [s for s in build_timeline([trace]).spans if s.row.startswith("in flight")]
    if stage == "scheduler":
        assert {s.name: s.start + trace.begin for s in flights} == {
            f"step {number}": at for number, at in enumerate(begun)
        }


def answers(role: Role, channel: str, message: Message) -> list[Message]:
    return [one.send.message for one in role.take(channel, message)]


@pytest.mark.parametrize("stage", ["scheduler", "engine"])
def test_a_recorded_engine_answers_each_plan_once_and_asks_for_what_it_misses(stage, request):
    role = EngineRole(request.getfixturevalue(stage), ME)
    answers(role, "plan", BeginEpoch(1, (ME,)))
    assert answers(role, "plan", PLANS[0]) == RESULTS[:1]
    assert answers(role, "plan", PLANS[2]) == [MISSED]
    assert [answers(role, "plan", p) for p in PLANS] == [[], RESULTS[1:2], RESULTS[2:]]
    assert role.finished and answers(role, "plan", PLANS[2]) == []


@pytest.mark.parametrize("stage", ["scheduler", "engine"])
def test_a_recorded_scheduler_publishes_again_what_a_live_engine_misses(stage, request):
    role = SchedulerRole(request.getfixturevalue(stage))
    answers(role, "result", HELLO)
    assert answers(role, "result", Ready(1, 0, ME)) == PLANS[:2]
    assert answers(role, "result", MISSED) == PLANS[1:2]
    assert [answers(role, "result", result) for result in RESULTS] == [PLANS[2:], [], []]
    assert role.finished

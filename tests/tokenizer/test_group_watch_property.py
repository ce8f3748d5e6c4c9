"""Counts that are kept with every heartbeat say what looking at all stages would say."""

from __future__ import annotations

import sys
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.messages import Heartbeat, State
from pipeinfer.tokenizer.group_watch import GONE, SILENCE, GroupWatch
from pipeinfer.tokenizer.routing import Report, Router

GROUPS, RANKS = 3, 2
stages = st.sampled_from(
    [("scheduler", group, 0) for group in range(GROUPS)]
    + [("engine", group, rank) for group in range(GROUPS) for rank in range(RANKS)]
)
beats = st.tuples(stages, st.sampled_from(get_args(State)), st.integers(1, 3))
steps = st.lists(st.one_of(beats, st.floats(0.1, SILENCE)), max_size=60)


class Simple:
    """The definition: every stage with what it last said, and all of them looked at each time."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[str, int, str, int, float]] = {}
        self.silent: set[str] = set()

    def beat(self, stage: str, name: str, group: int, state: str, lives: int, now: float) -> bool:
        if stage in self.stages and lives < self.stages[stage][3]:
            return False
        self.stages[stage] = name, group, state, lives, now
        self.silent.discard(stage)
        return True

    def look(self, now: float) -> set[int]:
        """Groups that are down because of somebody who was ready and has fallen silent."""
        late = {s for s, v in self.stages.items() if now - v[4] > SILENCE} - self.silent
        self.silent |= late
        return {self.stages[s][1] for s in late if self.stages[s][2] == "ready"}

    def up(self, group: int) -> bool:
        mine = {s: v for s, v in self.stages.items() if v[1] == group}
        return all(v[2] == "ready" and s not in self.silent for s, v in mine.items())

    def deserted(self) -> list[int]:
        here = [v for s, v in self.stages.items() if s not in self.silent]
        waits = {v[1] for v in here if v[0] == "scheduler" and v[2] == "waiting"}
        return sorted(waits & {v[1] for v in here if v[0] == "engine" and v[2] in GONE})


@given(steps)
def test_the_counts_are_those_of_all_stages(done):
    watch, simple, router, now = GroupWatch(), Simple(), Router("round-robin", GROUPS), 0.0
    for step in done:
        if isinstance(step, float):
            now += step
            gone = watch.silent(now)
            assert {group for group, _ in gone} == simple.look(now)
            for group, report in gone:
                router.report(group, report)
        else:
            (name, group, rank), state, lives = step
            stage = f"{name}-{group}" + (f"-{rank}" if name == "engine" else "")
            taken = simple.beat(stage, name, group, state, lives, now)
            beat = Heartbeat(stage, name, group, rank, 0, 1, lives, state)
            report = watch.heartbeat(beat, now)
            assert (report is not None) == taken
            if report is not None:
                assert report.up == simple.up(group)
                router.report(group, report)
        assert watch.deserted() == simple.deserted()
        assert [g for g in range(GROUPS) if watch.is_deserted(g)] == simple.deserted()
        reports = router._groups.reports
        assert router.up == sum(report.up for report in reports)


@given(st.dictionaries(st.sampled_from(["running", "tokens_left", "page_tokens"]), st.floats()))
def test_statistics_that_are_no_numbers_are_none(stats):
    beat = Heartbeat("scheduler-0", "scheduler", 0, 0, 0, 1, 1, "ready", "", stats)
    report = GroupWatch().heartbeat(beat, 0.0)
    assert isinstance(report, Report) and isinstance(report.tokens, int)


def calls(groups: int, ranks: int) -> int:
    """Lines of Python that one heartbeat costs where there are so many stages."""
    watch = GroupWatch()
    for group in range(groups):
        watch.heartbeat(
            Heartbeat(f"scheduler-{group}", "scheduler", group, 0, 0, 1, 1, "waiting"), 0.0
        )
        for rank in range(ranks):
            stage = f"engine-{group}-{rank}"
            watch.heartbeat(Heartbeat(stage, "engine", group, rank, 0, 1, 1, "loading"), 0.0)
    lines = 0

    def count(_frame, event, _argument):
        nonlocal lines
        lines += event in ("line", "call")
        return count

    beat = Heartbeat("engine-0-0", "engine", 0, 0, 0, 1, 1, "loading")
    sys.settrace(count)
    watch.heartbeat(beat, 1.0)
    watch.is_deserted(0)
    sys.settrace(None)
    return lines


def test_a_heartbeat_costs_the_same_however_many_stages_there_are():
    assert calls(64, 8) == calls(2, 1)

"""What follows from heartbeats is kept with each of them, and is what all rows together say."""

from __future__ import annotations

import gc
import sys
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.gateway.health import MAX_NAMED, PER_GROUP, ExpectedStage, Health
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.messages import Heartbeat, State
from pipeinfer.step_cost import Targets
from pipeinfer.topology import SUPERVISOR


def expected(groups: int, ranks: int) -> list[ExpectedStage]:
    found = [ExpectedStage("gateway-0", "gateway"), ExpectedStage("tokenizer-0", "tokenizer")]
    for group in range(groups):
        found.append(ExpectedStage(f"scheduler-{group}", "scheduler", group))
        found += [ExpectedStage(f"engine-{group}-{r}", "engine", group, r) for r in range(ranks)]
    return [*found, ExpectedStage("detokenizer-0", "detokenizer")]


def beat(stage: ExpectedStage, state: State, incarnation: int = 1, reason: str = "") -> Heartbeat:
    return Heartbeat(
        stage.stage, stage.name, stage.group, stage.rank, 0, 1, incarnation, state, reason
    )


SILENCE = 5.0  # seconds, where stages are few
STAGES = expected(3, 2)
events = st.one_of(
    st.floats(0.1, SILENCE + 1),
    st.tuples(st.sampled_from(STAGES), st.sampled_from(get_args(State)), st.integers(1, 3)),
    # Mostly ready, or nothing would ever be answered.
    st.tuples(st.sampled_from(STAGES), st.just("ready"), st.just(3)),
)


@given(st.booleans(), st.lists(events, max_size=60))
def test_what_is_missing_and_whether_requests_are_answered_follows_from_all_rows(ready, done):
    health, now = Health(STAGES), 0.0
    for stage in STAGES if ready else ():
        health.on_heartbeat(beat(stage, "ready"), now)
    for event in done:
        if isinstance(event, float):
            now += event
            health.mark_lost(now)
        else:
            stage, state, incarnation = event
            health.on_heartbeat(beat(stage, state, incarnation, f"it is {state}"), now)
        rows = list(health.stages.values())
        missing = [r for r in rows if r.name != "gateway" and r.state != "ready"]
        assert health.not_ready() == missing and health.all_ready() == (not missing)
        common = any(row.name not in PER_GROUP for row in missing)
        groups = {row.group for row in rows if row.name in PER_GROUP}
        assert health.can_serve() == (not common and bool(groups - {r.group for r in missing}))
        named = [f"{r.stage} is {r.state}" for r in missing[:MAX_NAMED]]
        assert [part.split(" (")[0] for part in health.reason().split("; ") if part][
            : len(named)
        ] == named
        rest = len(missing) - MAX_NAMED
        assert health.reason().endswith(f"and {rest} more") == (rest > 0)


def lines(groups: int, ranks: int) -> int:
    """Lines of Python that a heartbeat costs, with all that a gateway asks after it."""
    stages = expected(groups, ranks)
    health, counted = Health(stages), 0
    for stage in stages:
        health.on_heartbeat(beat(stage, "loading"), 0.0)

    def count(_frame, event, _argument):
        nonlocal counted
        counted += event in ("line", "call")
        return count

    gc.disable()  # what is told of collections are lines of others
    sys.settrace(count)
    for state in ("ready", "loading"):
        health.on_heartbeat(beat(stages[3], state), 1.0)
        assert not health.can_serve() and not health.all_ready() and health.reason()
    sys.settrace(None)
    gc.enable()
    return counted


def test_a_heartbeat_costs_the_same_however_many_stages_there_are():
    assert lines(64, 8) == lines(4, 3)


def test_a_statistic_is_summed_over_groups_and_not_over_ranks():
    health = Health(expected(3, 2))
    for group in range(2):
        for rank in range(2):
            stage = ExpectedStage(f"engine-{group}-{rank}", "engine", group, rank)
            told = beat(stage, "ready")
            health.on_heartbeat(
                structs.replace(told, stats={"pages": 10.0 + group + 100 * rank}), 0.0
            )
    assert health.total("engine", "pages") == 10 + 11
    assert health.total("engine", "unknown") == health.total("scheduler", "pages") == 0
    assert health.total("gateway", "pages") == 0


def test_a_stage_is_lost_after_its_silence_and_not_at_its_end():
    health = Health(STAGES)
    health.on_heartbeat(beat(STAGES[1], "ready", reason=""), 10.0)
    health.mark_lost(10.0 + SILENCE)
    assert STAGES[1].stage not in [row.stage for row in health.not_ready()]
    health.mark_lost(10.1 + SILENCE)
    [row] = [row for row in health.not_ready() if row.stage == STAGES[1].stage]
    assert (row.state, row.reason) == ("lost", f"silent for more than {SILENCE:g} s")
    health.on_heartbeat(beat(STAGES[1], "ready"), 30.0)
    assert row.state == "ready" and row not in health.not_ready()


def test_a_process_that_was_replaced_is_not_heard():
    health = Health(STAGES)
    health.on_heartbeat(beat(STAGES[1], "ready", 5), 0.0)
    health.on_heartbeat(beat(STAGES[1], "draining", 4), 0.0)
    health.on_heartbeat(beat(ExpectedStage("stranger-0", "stranger"), "ready"), 0.0)
    assert health.stages[STAGES[1].stage].state == "ready" and "stranger-0" not in health.stages
    health.on_heartbeat(beat(STAGES[1], "loading", 5), 0.0)
    assert health.stages[STAGES[1].stage].state == "loading", "the same process"


def test_processes_after_the_first_are_counted_and_a_last_word_is_none():
    """The supervisor says of a process that ended what the process cannot say itself."""
    health, stage = Health(STAGES), STAGES[1]
    row = health.stages[stage.stage]
    first, second, third = 10**18, 10**18 + 10**9, 10**18 + 10**10
    heard = [(0.0, first), (1.0, first), (2.0, first + 1), (2.5, first + 1)]
    for now, process in heard:
        health.on_heartbeat(beat(stage, "ready", process), now)
        assert (row.restarts, row.restarted_at) == (0, None)
    for now, process in ((3.0, second), (4.0, second), (4.5, first), (5.0, second + 1)):
        health.on_heartbeat(beat(stage, "ready", process), now)
        assert (row.restarts, row.restarted_at) == (1, 3.0)
    health.on_heartbeat(beat(stage, "starting", third), 6.0)
    assert (row.restarts, row.restarted_at) == (2, 6.0)
    assert all(other.restarts == 0 for other in health.stages.values() if other is not row)


def test_metrics_say_which_stages_are_up_and_how_often_each_began_again():
    health, answering = Health(STAGES), False
    metrics = Metrics(health, lambda: answering, Targets(itl=0.05, ttft=2))

    def samples() -> dict[str, float]:
        lines = metrics.exposition("")[0].decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.removeprefix("pipeinfer_"): float(value) for name, value in pairs}

    health.on_heartbeat(beat(STAGES[1], "ready", 10), 0.0)
    health.on_heartbeat(beat(STAGES[2], "ready", 10), 0.0)
    health.on_heartbeat(beat(STAGES[2], "loading", 20), 1.0)
    found, up = samples(), 'stage_up{stage="%s"}'
    assert [found[up % stage.stage] for stage in STAGES[:3]] == [0, 1, 0]
    began = 'stage_restarts_total{stage="%s"}'
    assert [found[began % stage.stage] for stage in STAGES[:3]] == [0, 0, 1]
    assert len([name for name in found if name.startswith("stage_up{")]) == len(STAGES)
    assert (found['target_seconds{of="ttft"}'], found['target_seconds{of="itl"}']) == (2, 0.05)
    assert found["ready"] == 0
    answering = True
    assert samples()["ready"] == 1
    health.on_heartbeat(beat(STAGES[2], "ready", 20), 2.0)
    health.mark_lost(2.0 + SILENCE)  # the other was silent since 0.0
    assert [samples()[up % stage.stage] for stage in STAGES[:3]] == [0, 0, 1]


def test_what_schedulers_and_engines_count_is_exposed():
    health = Health(expected(2, 1))
    for group in range(2):
        told = beat(ExpectedStage(f"scheduler-{group}", "scheduler", group), "ready")
        health.on_heartbeat(structs.replace(told, stats={"preemptions_total": 3.0 + group}), 0.0)
        told = beat(ExpectedStage(f"engine-{group}-0", "engine", group), "ready")
        health.on_heartbeat(structs.replace(told, stats={"pages_evictable": 5.0}), 0.0)
    lines = Metrics(health).exposition("")[0].decode().splitlines()
    assert {"pipeinfer_preemptions_total 7.0", "pipeinfer_pages_evictable 10.0"} <= set(lines)


def test_the_supervisor_says_how_many_standbys_are_ready():
    health, supervisor = Health(STAGES), ExpectedStage(SUPERVISOR, "supervisor")
    for ready in (2, 0):
        said = structs.replace(beat(supervisor, "ready"), stats={"standbys_ready": float(ready)})
        health.on_heartbeat(said, 0.0)
        assert health.standbys_ready == ready and SUPERVISOR not in health.stages

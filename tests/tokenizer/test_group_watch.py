"""A group is up while its scheduler and all its ranks are ready and heard."""

from __future__ import annotations

from pipeinfer.messages import Heartbeat, State
from pipeinfer.tokenizer.group_watch import SILENCE, GroupWatch
from pipeinfer.tokenizer.routing import Report


def beat(stage: str, state: State = "ready", incarnation: int = 1, **stats: float) -> Heartbeat:
    name, *place = stage.split("-")
    rank = int(place[1]) if len(place) > 1 else 0
    return Heartbeat(stage, name, int(place[0]), rank, 0, 1, incarnation, state, "", stats)


def test_a_group_is_down_while_any_of_its_ranks_is_not_ready():
    watch = GroupWatch()
    for stage in ("scheduler-1", "engine-1-0", "engine-1-1"):
        report = watch.heartbeat(beat(stage), 0.0)
        assert report is not None and report.up
    for state in ("starting", "loading", "waiting"):
        report = watch.heartbeat(beat("engine-1-1", state), 1.0)
        assert report is not None and not report.up
        report = watch.heartbeat(beat("scheduler-1"), 1.0)
        assert report is not None and not report.up, "the scheduler does not know it yet"
    report = watch.heartbeat(beat("engine-1-1"), 1.5)
    assert report is not None and report.up


def test_a_rank_that_falls_silent_takes_its_group_down_once_and_others_stay():
    watch = GroupWatch()
    for stage in ("scheduler-0", "engine-0-0", "scheduler-1", "engine-1-0"):
        watch.heartbeat(beat(stage), 0.0)
    for stage in ("scheduler-0", "engine-0-0", "scheduler-1"):
        watch.heartbeat(beat(stage), SILENCE)
    assert watch.silent(SILENCE) == []
    assert [(group, report.up) for group, report in watch.silent(SILENCE + 0.1)] == [(1, False)]
    assert watch.silent(SILENCE + 0.2) == []
    report = watch.heartbeat(beat("engine-1-0"), SILENCE + 0.3)
    assert report is not None and report.up


def test_a_report_puts_together_what_scheduler_and_rank_0_say():
    watch = GroupWatch()
    watch.heartbeat(beat("engine-0-0", pages_total=100, pages_evicted=7, page_tokens=16), 0.0)
    watch.heartbeat(beat("engine-0-1", pages_total=90, pages_evicted=9, page_tokens=16), 0.0)
    told = beat("scheduler-0", tokens_left=500, running=2, waiting=3, epochs_total=4)
    assert watch.heartbeat(told, 0.0) == Report(True, 500, 1600, 112, 4, 5)
    assert watch.heartbeat(beat("detokenizer-0"), 0.0) is None


def test_late_words_of_a_process_that_ended_do_not_count():
    watch = GroupWatch()
    for stage in ("scheduler-0", "engine-0-0"):
        watch.heartbeat(beat(stage), 0.0)
    report = watch.heartbeat(beat("engine-0-0", "starting", incarnation=2), 0.1)
    assert report is not None and not report.up
    assert watch.heartbeat(beat("engine-0-0"), 0.2) is None
    report = watch.heartbeat(beat("scheduler-0"), 0.3)
    assert report is not None and not report.up


def test_a_group_is_deserted_while_its_scheduler_waits_for_a_rank_that_is_not_there():
    watch = GroupWatch()
    for stage in ("scheduler-1", "engine-1-0", "engine-1-1"):
        watch.heartbeat(beat(stage), 0.0)
    watch.heartbeat(beat("engine-1-1", "starting"), 0.1)
    assert watch.deserted() == [], "its scheduler does not know it yet"
    watch.heartbeat(beat("scheduler-1", "waiting"), 0.2)
    assert watch.deserted() == [1]
    watch.heartbeat(beat("engine-1-1", "waiting"), 0.3)
    assert watch.deserted() == [], "an epoch is about to begin"
    watch.heartbeat(beat("engine-1-1", "loading"), 0.4)
    for stage in ("engine-1-0", "engine-1-1"):
        watch.heartbeat(beat(stage, "loading"), SILENCE + 0.3)
    watch.silent(SILENCE + 0.3)
    assert watch.deserted() == [], "nobody is there to hand anything over"

"""What the ranks of a group say of themselves, and what is said of them."""

from __future__ import annotations

from pipeinfer.messages import Ended, GroupStatus, RankStatus, State, TokenizedRequest
from pipeinfer.scheduler.epochs import SILENT_SECONDS, GroupAnnouncer, RankStates
from pipeinfer.scheduler.planner import SchedulerOptions


def said(rank: int, incarnation: int = 1, state: State = "ready") -> RankStatus:
    return RankStatus(0, rank, incarnation, state)


def test_a_rank_that_begins_anew_is_gone_until_it_has_loaded():
    ranks = RankStates()
    for rank in range(2):
        ranks.on_status(said(rank), 0.0)
    assert not ranks.deserted and not ranks.silent
    for state in ("starting", "loading"):
        ranks.on_status(said(1, 2, state), 1.0)
        assert ranks.deserted
    ranks.on_status(said(1, 2, "waiting"), 1.0)
    assert not ranks.deserted


def test_a_death_counts_until_a_later_process_is_heard_and_a_late_word_does_not():
    ranks = RankStates()
    ranks.on_status(said(0, 5), 0.0)
    ranks.on_ended(0, Ended("engine-0-0", 5, 9, "killed"), 0.1)
    assert ranks.deserted and ranks.alive() == []
    ranks.on_status(said(0, 5), 0.2)
    assert ranks.deserted, "sent before it died"
    ranks.on_status(said(0, 6, "waiting"), 0.3)
    ranks.on_ended(0, Ended("engine-0-0", 5, 9, "killed"), 0.4)
    assert not ranks.deserted and ranks.alive() == [(0, 6)]


def test_a_death_of_a_process_that_was_never_heard_is_that_of_its_rank():
    ranks = RankStates()
    ranks.on_status(said(0, 5), 0.0)
    ranks.on_ended(0, Ended("engine-0-0", 6, 9, "killed"), 0.1)
    assert ranks.deserted and ranks.alive() == []


def test_a_rank_that_falls_silent_is_noticed_and_comes_back():
    ranks = RankStates()
    for rank in range(2):
        ranks.on_status(said(rank), 0.0)
    ranks.on_status(said(0), SILENT_SECONDS)
    ranks.check(SILENT_SECONDS)
    assert not ranks.silent
    ranks.check(SILENT_SECONDS + 0.1)
    assert ranks.silent and not ranks.deserted
    ranks.on_status(said(1), SILENT_SECONDS + 0.2)
    assert not ranks.silent


def test_a_rank_that_is_silent_for_too_long_is_gone():
    ranks = RankStates(host_loss=20.0)
    ranks.on_status(said(0, 5), 0.0)
    assert not ranks.check(20.0) and not ranks.deserted
    assert ranks.check(20.1) and ranks.deserted
    ranks.on_status(said(0, 5), 20.2)
    assert not ranks.check(20.2) and not ranks.deserted


def test_one_that_has_ended_is_gone_however_long_nobody_starts_it():
    ranks = RankStates()
    ranks.on_status(said(0, 5), 0.0)
    ranks.on_ended(0, Ended("engine-0-0", 5, 9, "killed"), 0.1)
    ranks.check(60.0)
    assert ranks.deserted and not ranks.silent


def test_tokenizers_are_told_at_a_change_and_twice_a_second():
    announcer = GroupAnnouncer(0, 1, SchedulerOptions())

    def told() -> GroupStatus:
        return GroupStatus(0, 1, "serves")

    assert [s.channel for s in announcer.take_due("serves", 0.0, told)] == ["group"]
    assert announcer.take_due("serves", 0.4, told) == []
    assert announcer.take_due("waits", 0.4, told) != []
    assert announcer.take_due("waits", 0.5, told) == []
    assert announcer.take_due("waits", 0.9, told) != []


def test_work_of_a_group_is_what_tokenizers_are_told():
    from test_scheduler_core import pipeline

    from pipeinfer.core import Tick
    from pipeinfer.params import RequestParams
    from pipeinfer.wire import pack

    p = pipeline(pages=10, page_size=4)
    p.deliver()
    p.deliver()
    p.core.handle(
        TokenizedRequest("r", 1, 0, 0, pack([1] * 6), RequestParams(max_tokens=10), 0), 0.0
    )
    for event, standing in (
        (said(0), "serves"),
        (Ended("engine-0-0", 0, 9, "killed"), "serves"),
        (Ended("engine-0-0", 1, 9, "killed"), "deserted"),
        (said(0, 2, "loading"), "deserted"),
        (said(0, 2, "waiting"), "waits"),
    ):
        p.core.handle(event, p.now)
        p.now += 1.0
        [told] = [
            s.message for s in p.core.handle(Tick(), p.now) if isinstance(s.message, GroupStatus)
        ]
        assert told.readiness == standing, event
        assert (told.requests, told.tokens, told.capacity) == (1, 16, 40)

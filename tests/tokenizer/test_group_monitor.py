"""A group is up while its scheduler says that it serves, and is heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.messages import Ended, GroupReadiness, GroupStatus
from pipeinfer.tokenizer.routing import MAX_SILENCE_SECONDS, GroupMonitor, GroupReport, GroupRouter

GROUPS = 3


def said(
    group: int, standing: GroupReadiness = "serves", incarnation: int = 1, **told: int
) -> GroupStatus:
    return GroupStatus(group, incarnation, standing, **told)


def up(report: GroupReport | None) -> bool:
    assert report is not None
    return report.up


def test_a_group_is_down_while_its_scheduler_does_not_serve():
    watch = GroupMonitor()
    assert up(watch.on_status(said(1), 0.0))
    assert not up(watch.on_status(said(1, "waits"), 0.1))
    assert watch.deserted() == []
    assert not up(watch.on_status(said(1, "deserted"), 0.2))
    assert watch.deserted() == [1] and watch.is_deserted(1) and not watch.is_deserted(0)
    assert up(watch.on_status(said(1), 0.3))
    assert watch.deserted() == []


def test_a_scheduler_that_falls_silent_takes_its_group_down_once_and_others_stay():
    watch = GroupMonitor()
    for group in range(2):
        watch.on_status(said(group), 0.0)
    watch.on_status(said(0), MAX_SILENCE_SECONDS)
    assert watch.newly_silent(MAX_SILENCE_SECONDS) == []
    assert [
        (group, report.up) for group, report in watch.newly_silent(MAX_SILENCE_SECONDS + 0.1)
    ] == [(1, False)]
    assert watch.newly_silent(MAX_SILENCE_SECONDS + 0.2) == []
    assert up(watch.on_status(said(1), MAX_SILENCE_SECONDS + 0.3))
    watch.on_status(said(1, "deserted"), MAX_SILENCE_SECONDS + 0.4)
    assert watch.newly_silent(3 * MAX_SILENCE_SECONDS) != []
    assert watch.deserted() == [], "nobody is there to hand anything over"


def test_a_report_is_what_the_scheduler_said():
    told = said(0, requests=5, tokens=500, capacity=1600, evicted=112, epoch=4)
    assert GroupMonitor().on_status(told, 0.0) == GroupReport(True, 500, 1600, 112, 4, 5)


def test_late_words_of_an_epoch_that_ended_do_not_count():
    watch = GroupMonitor()
    assert watch.on_status(said(0, epoch=4), 0.0)
    assert watch.on_status(said(0, "waits", epoch=3), 0.1) is None
    assert up(watch.on_status(said(0, epoch=4, tokens=7), 0.2))
    assert watch.on_status(said(0, incarnation=2, epoch=1), 0.3), "another process counts anew"
    assert watch.on_status(said(0, epoch=9), 0.4) is None


def test_late_words_of_a_scheduler_that_ended_do_not_count():
    watch = GroupMonitor()
    watch.on_status(said(0, incarnation=5), 0.0)
    assert not up(watch.on_ended(Ended("scheduler-0", 5, 9, "killed"))[1])
    assert watch.on_ended(Ended("scheduler-0", 5, 9, "killed"))[1] is None, "it is told again"
    assert not up(watch.on_status(said(0, "waits", incarnation=6), 0.1))
    assert watch.on_status(said(0, incarnation=5), 0.2) is None
    assert watch.on_ended(Ended("scheduler-0", 5, 9, "killed"))[1] is None
    assert up(watch.on_status(said(0, incarnation=6), 0.3))
    assert watch.on_ended(Ended("scheduler-1", 5, 9, "killed"))[1] is None, "never heard of"


words = st.tuples(
    st.integers(0, GROUPS - 1),
    st.sampled_from(["serves", "waits", "deserted"]),
    st.integers(1, 3),
    st.booleans(),
)


@given(st.lists(st.one_of(words, st.floats(0.1, MAX_SILENCE_SECONDS)), max_size=60))
def test_what_is_up_and_deserted_is_what_the_last_words_say(done):
    """The model: each group's last word, its time, and whether it counts any more."""
    watch, router, now = GroupMonitor(), GroupRouter("round-robin", GROUPS), 0.0
    last: dict[int, tuple[str, int, float]] = {}
    lost: set[int] = set()
    for step in done:
        if isinstance(step, float):
            now += step
            late = {
                g for g, (_, _, heard) in last.items() if now - heard > MAX_SILENCE_SECONDS
            } - lost
            lost |= late
            gone = watch.newly_silent(now)
            assert {group for group, _ in gone} == {g for g in late if last[g][0] == "serves"}
            for group, report in gone:
                router.on_report(group, report)
            continue
        group, standing, incarnation, ends = step
        before = last[group][1] if group in last else 0
        if ends:
            report = watch.on_ended(Ended(f"scheduler-{group}", incarnation, 9, ""))[1]
            news = group in last and group not in lost and incarnation >= before
            lost |= {group} if news else set()
        else:
            report = watch.on_status(said(group, standing, incarnation), now)
            news = incarnation >= before
            if news:
                last[group] = standing, incarnation, now
                lost.discard(group)
        assert (report is not None) == news
        if report is not None:
            assert report.up == (last[group][0] == "serves" and group not in lost)
            router.on_report(group, report)
        assert watch.deserted() == [
            g for g in sorted(last) if last[g][0] == "deserted" and g not in lost
        ]
        assert router.up == sum(report.up for report in router._groups.reports)

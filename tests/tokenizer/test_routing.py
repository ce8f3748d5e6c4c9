"""The router and the monitor of groups: prefixes, load, silence; and requests that were sent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.core import block_hashes
from pipeinfer.messages import Ended, GroupReadiness, GroupStatus, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.settings import ConfigurationError
from pipeinfer.tokenizer.routing import (
    BLOCK_TOKENS,
    MAX_SILENCE_SECONDS,
    PREFILL_WEIGHT,
    ApproximateCache,
    GroupMonitor,
    GroupReport,
    GroupRouter,
    RoutedRequest,
    RoutedRequests,
)
from pipeinfer.wire import pack


def prompt(seed: int, length: int, prefix: np.ndarray | None = None) -> np.ndarray:
    tail = np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)
    return tail if prefix is None else np.concatenate([prefix, tail])


def choose(
    router: GroupRouter, name: str, ids: np.ndarray, outputs: int = 10, salt: str = ""
) -> int:
    return router.choose(name, ids, outputs, salt)


def test_one_group_needs_no_policy_and_an_unknown_policy_is_named():
    assert choose(GroupRouter("prefix", 1), "a", prompt(0, 5)) == 0
    with pytest.raises(ConfigurationError, match="'sideways' is none of"):
        GroupRouter("sideways", 2)


def test_round_robin_takes_each_in_turn_and_skips_who_is_down():
    router = GroupRouter("round-robin", 3)
    assert [choose(router, str(n), prompt(n, 4)) for n in range(4)] == [0, 1, 2, 0]
    router.on_report(1, GroupReport(up=False))
    assert [choose(router, f"x{n}", prompt(n, 4)) for n in range(4)] == [2, 0, 2, 0]


def test_a_prompt_goes_where_its_prefix_is():
    router = GroupRouter("prefix", 4)
    shared = [prompt(seed, 10 * BLOCK_TOKENS) for seed in range(4)]
    homes = [choose(router, f"first{n}", ids) for n, ids in enumerate(shared)]
    assert sorted(homes) == [0, 1, 2, 3]  # nobody has anything: one each
    for n in range(40):
        which = n * 7 % 4
        group = choose(router, f"r{n}", prompt(100 + n, 20, shared[which]))
        assert group == homes[which]
        router.on_ended(f"r{n}")


def test_no_other_group_would_have_had_less_to_do():
    """Of many requests with shared beginnings; also groups that seem too busy to be looked at."""
    source = np.random.default_rng(5)
    router, heads = (
        GroupRouter("prefix", 12),
        [prompt(seed, 6 * BLOCK_TOKENS) for seed in range(20)],
    )
    for number in range(400):
        ids = prompt(1000 + number, int(source.integers(1, 200)), heads[source.integers(20)])
        keys, known = block_hashes(pack(ids), BLOCK_TOKENS, ""), router._groups
        costs = [
            PREFILL_WEIGHT * (len(ids) - known.caches[group].matched_tokens(keys)) + load
            for group, load in enumerate(router.loads())
        ]
        ever = list(known.total_sent_tokens)
        chosen = choose(router, str(number), ids, int(source.integers(1, 900)))
        assert (costs[chosen], ever[chosen], chosen) == min(
            zip(costs, ever, range(12), strict=True)
        )
        if number > 30:
            router.on_ended(str(number - int(source.integers(1, 30))))


def test_salted_prefixes_are_not_shared():
    router = GroupRouter("prefix", 2)
    ids = prompt(0, 10 * BLOCK_TOKENS)
    assert choose(router, "a", ids, salt="one") == 0
    assert choose(router, "b", ids, salt="two") == 1
    router.on_ended("a")
    router.on_ended("b")
    assert choose(router, "c", ids, salt="two") == 1


def test_a_busy_home_is_left_when_waiting_costs_more_than_computing():
    router = GroupRouter("prefix", 2)
    ids = prompt(0, 4 * BLOCK_TOKENS)
    assert choose(router, "home", ids, outputs=8 * BLOCK_TOKENS) == 0
    assert choose(router, "other", ids) == 1  # 4 blocks to compute against 12 before it
    router.on_ended("home")
    router.on_ended("other")
    assert choose(router, "again", ids) == 1  # both have it by now; this one was given less


def test_a_group_that_is_down_gets_nothing_and_one_that_came_back_is_used_again():
    router = GroupRouter("least-loaded", 2)
    router.on_report(0, GroupReport(up=False))
    assert {choose(router, str(n), prompt(n, 4)) for n in range(5)} == {1}
    router.on_report(0, GroupReport(up=True))
    assert choose(router, "next", prompt(9, 4)) == 0
    router.on_report(0, GroupReport(up=False))
    router.on_report(1, GroupReport(up=False))
    assert choose(router, "last", prompt(9, 4)) in (0, 1)  # it waits for either to come back


def test_work_that_came_from_elsewhere_counts():
    router = GroupRouter("least-loaded", 2)
    router.on_report(0, GroupReport(up=True, tokens=1000, requests=3))
    assert {choose(router, str(n), prompt(n, 4), outputs=50) for n in range(5)} == {1}
    assert router.loads() == [1000, 5 * 54]
    router.on_report(1, GroupReport(up=True, tokens=9000, requests=5))  # those sent from here
    assert router.loads() == [1000, 5 * 54]
    router.on_report(1, GroupReport(up=True, tokens=9000, requests=6))  # and one from elsewhere
    assert router.loads() == [1000, 6 * 54]


def test_a_new_epoch_forgets_what_was_cached_and_evictions_forget_the_oldest():
    router = GroupRouter("prefix", 2)
    old, new = prompt(0, 6 * BLOCK_TOKENS), prompt(1, 3 * BLOCK_TOKENS)
    router.on_report(1, GroupReport(up=False))
    for name, ids in (("old", old), ("new", new)):
        choose(router, name, ids)
        router.on_ended(name)
    router.on_report(1, GroupReport(up=True))
    assert choose(router, "a", old) == 0
    router.on_ended("a")
    router.on_report(
        0, GroupReport(up=True, evicted=3 * BLOCK_TOKENS + 1)
    )  # those of `new`, used before `old`
    router.on_report(0, GroupReport(up=True, tokens=2 * BLOCK_TOKENS, evicted=3 * BLOCK_TOKENS + 1))
    assert choose(router, "b", new) == 1
    router.on_ended("b")
    router.on_report(0, GroupReport(up=True, epoch=1))
    router.on_report(0, GroupReport(up=True, tokens=1, epoch=1))
    assert choose(router, "c", old) == 1


def test_what_was_evicted_is_forgotten_once_however_reports_go_back_and_forth():
    router = GroupRouter("prefix", 2)
    old, new = prompt(0, 3 * BLOCK_TOKENS), prompt(1, 6 * BLOCK_TOKENS)
    router.on_report(1, GroupReport(up=False))
    for name, ids in (("old", old), ("new", new)):
        choose(router, name, ids)
        router.on_ended(name)
    for evicted in (3 * BLOCK_TOKENS, 0) * 3 + (3 * BLOCK_TOKENS,):  # those of `old`
        router.on_report(0, GroupReport(up=True, evicted=evicted))
    router.on_report(
        0, GroupReport(up=True, tokens=BLOCK_TOKENS, evicted=3 * BLOCK_TOKENS, requests=1)
    )
    router.on_report(1, GroupReport(up=True))
    assert choose(router, "again", new) == 0, "it is cached there"


def test_a_request_that_an_earlier_process_sent_counts_where_it_is():
    router = GroupRouter("prefix", 2)
    ids = prompt(0, 3 * BLOCK_TOKENS)
    assert router.record_sent(1, "a", ids, 10, "") == 1
    assert router.record_sent(1, "a", ids, 10, "") == 1
    assert router.loads() == [0, 3 * BLOCK_TOKENS + 10]
    router.on_ended("a")
    router.on_ended("a")
    assert router.loads() == [0, 0]


class Model:
    """Prefixes as a list of whole prompts, the most recent last; blocks counted one by one."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, ...]] = []

    def add(self, ids: list[int], capacity: int) -> None:
        for count in range(len(ids) // BLOCK_TOKENS, 0, -1):
            block = tuple(ids[: count * BLOCK_TOKENS])
            if block in self.blocks:
                self.blocks.remove(block)
            self.blocks.append(block)
        if capacity:
            self.blocks = self.blocks[-max(capacity // BLOCK_TOKENS, 1) :]

    def matched(self, ids: list[int]) -> int:
        count = 0
        while (
            tuple(ids[: (count + 1) * BLOCK_TOKENS]) in self.blocks
            and len(ids) >= (count + 1) * BLOCK_TOKENS
        ):
            count += 1
        return count * BLOCK_TOKENS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 70)), max_size=25),
    st.integers(0, 6),
)
def test_prefixes_are_those_of_a_plain_list(prompts, capacity):
    prefixes, model = ApproximateCache(), Model()
    for words, rest in prompts:
        ids = [word for word in words for _ in range(BLOCK_TOKENS)] + [9] * rest
        keys = block_hashes(pack(ids), BLOCK_TOKENS, "")
        assert prefixes.matched_tokens(keys) == model.matched(ids)
        prefixes.add(keys, capacity * BLOCK_TOKENS)
        model.add(ids, capacity * BLOCK_TOKENS)
        assert len(prefixes) == len(model.blocks) * BLOCK_TOKENS


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


ALL_GROUPS = (0, 1, 2)


def work(name: str, attempt: int = 1, gateway: int = 0) -> TokenizedRequest:
    return TokenizedRequest(name, attempt, gateway, 0, pack([1]), RequestParams(), 0)


def ledger(*entries: RoutedRequest) -> RoutedRequests:
    made = RoutedRequests(ALL_GROUPS)
    for entry in entries:
        made.put(entry)
    return made


def test_earlier_attempts_are_known_and_later_ones_are_not():
    known = ledger(RoutedRequest(work("r", 2), 1))
    assert known.has("r", 1) and known.has("r", 2)
    assert not known.has("r", 3) and not known.has("s", 1)


def test_a_new_attempt_counts_as_new():
    one, other = work("r"), work("s")
    again = work("r", 2)
    known = ledger(RoutedRequest(one, 1), RoutedRequest(other, 1), RoutedRequest(again, 1))
    assert list(known.of_group(1)) == [other, again] and len(known) == 2


def test_the_end_goes_to_all_groups_that_may_have_something_of_it():
    known = ledger(*(RoutedRequest(work(name), 1) for name in "abc"))
    assert known.remove("a") == (1,)
    assert known.remove("a") is None and known.get("a") is None
    assert known.move("b", 2, 5) == work("b", 5)
    assert list(known.of_group(2)) == [work("b", 5)] and known.remove("b") == ALL_GROUPS
    assert known.mark_leaving(1) == [work("c")] and known.remove("c") == ALL_GROUPS
    assert len(known) == 0


def test_a_scheduler_is_told_of_what_it_may_have():
    sure, unsure = (
        RoutedRequest(work("sure"), 1),
        RoutedRequest(work("unsure"), 2, group_certain=False),
    )
    known = ledger(sure, unsure)
    assert list(known.of_group(1)) == [sure.work, unsure.work]
    assert list(known.of_group(0)) == [unsure.work]
    assert known.mark_leaving(1) == [sure.work]
    assert known.get("unsure") == unsure, "nobody asked another group to hand it over"


def test_what_one_gateway_sent():
    known = ledger(RoutedRequest(work("a"), 0), RoutedRequest(work("b", gateway=1), 0))
    assert known.of_gateway(1) == [work("b", gateway=1)]

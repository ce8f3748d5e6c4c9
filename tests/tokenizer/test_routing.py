"""Requests find the group that has their prefix, unless it has too much to do or is down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.settings import ConfigurationError
from pipeinfer.tokenizer.routing import (
    BLOCK_TOKENS,
    PREFILL_WEIGHT,
    ApproximateCache,
    GroupReport,
    GroupRouter,
    block_hashes,
)


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
        keys, known = block_hashes(ids, ""), router._groups
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
    assert router.loads() == [1000, 5 * 54 + 1500]


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
        keys = block_hashes(np.array(ids, dtype=np.int32), "")
        assert prefixes.matched_tokens(keys) == model.matched(ids)
        prefixes.add(keys, capacity * BLOCK_TOKENS)
        model.add(ids, capacity * BLOCK_TOKENS)
        assert len(prefixes) == len(model.blocks) * BLOCK_TOKENS

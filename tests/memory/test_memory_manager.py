"""What the memory manager promises about single plans; random ones are in the machine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from hash_device import HashDevice, chain
from page_mirror import PageMirror
from pipeinfer.engine.step_builder import RequestTable, StepBuilder
from pipeinfer.memory.manager import MemoryManager, Rows, RunningDigest
from pipeinfer.memory.pages import IntegrityError, ProtocolError
from pipeinfer.messages import Admit, AppendTokens, Plan, Release
from pipeinfer.params import RequestParams
from pipeinfer.settings import ConfigurationError
from pipeinfer.step import Step
from pipeinfer.wire import pack

SIZE = 4


class Memory:
    """A manager, its steps, and a device that runs them when the test says so."""

    def __init__(self, pages: int = 33, cache: str = "radix", slots: int = 8) -> None:
        self.manager = MemoryManager(pages, SIZE, slots, 64, cache)
        self.requests = RequestTable(slots)
        self.steps = StepBuilder(self.manager, self.requests)
        self.device = HashDevice(pages, SIZE, slots)
        self.heard = PageMirror(slots)  # of steps that the device need not have run yet
        self.number = 0

    def plan(
        self,
        rows: dict[int, int],
        admits: Sequence[Admit] = (),
        releases: Sequence[Release] = (),
        reset: bool = False,
        appends: Sequence[AppendTokens] = (),
        shares: Sequence[int] = (),
    ) -> Rows:
        slots, counts = pack(list(rows)), pack(list(rows.values()))
        some = tuple(releases), tuple(admits)
        plan = Plan(1, self.number, *some, slots, counts, reset, tuple(appends), pack(shares))
        rows = self.manager.apply(plan)
        self.number += 1
        self.manager.check_integrity()
        for admit in admits:
            self.requests.put(admit)
        return rows

    def step(self, rows: Rows) -> Step:
        step = self.steps.build(1, rows)[0]
        self.heard.apply(step.delta)
        return step

    def run(self, *arguments, **keywords) -> tuple[Rows, list[int]]:
        rows = self.plan(*arguments, **keywords)
        return rows, self.device.run(self.step(rows)).tolist()

    def holds(self, step: Step, row: int, tokens: list[int]) -> bool:
        """True if the pages of a row of the latest step have the KV of `tokens`."""
        pages = self.heard.table[step.slots[row]]
        return self.device.read(pages, len(tokens)).tolist() == chain(tokens)


def admit(
    slot: int, tokens: list[int], prompt_len: int = 0, max_total: int = 64, **more: str
) -> Admit:
    return Admit(
        slot,
        f"request {slot}",
        pack(tokens),
        prompt_len or len(tokens),
        max_total,
        RequestParams(),
        seed=slot,
        **more,
    )


PROMPT = list(range(100, 112))  # three whole pages


def prompt_only(slot: int, tokens: list[int]) -> Admit:
    params = RequestParams(max_tokens=1, vector_size=8)
    return msgspec.structs.replace(admit(slot, tokens), params=params)


def test_prompts_that_nobody_continues_take_no_chats_prefix():
    """But what several of them begin with stays, as what a chat has."""
    memory, instruction = Memory(pages=17), list(range(50, 54))
    memory.run({0: 99}, [admit(0, PROMPT)])
    memory.run({}, releases=[Release(0, True)])
    for number in range(20):
        text = instruction + [1000 + 8 * number + i for i in range(8)]
        rows, _ = memory.run({1: 99}, [prompt_only(1, text)])
        assert rows.cached.tolist() == [4 if number else 0]
        memory.run({}, releases=[Release(1, True)])
    assert memory.manager.num_evicted > 0
    rows, _ = memory.run({1: 99}, [prompt_only(1, text)])
    assert rows.cached.tolist() == [8], "the last one is still there, and is protected from now on"
    memory.run({}, releases=[Release(1, True)])
    rows, _ = memory.run({0: 99}, [admit(0, PROMPT)])
    assert rows.cached.tolist() == [8]


def test_cached_prompt_of_whole_pages_still_computes_its_last_token():
    """Pitfall 3."""
    memory = Memory()
    memory.run({0: 99}, [admit(0, PROMPT)])
    memory.run({}, releases=[Release(0, True)])
    rows, ids = memory.run({1: 99}, [admit(1, PROMPT)])
    assert rows.cached.tolist() == [8]
    assert rows.counts.tolist() == [4] and rows.samples.tolist() == [True]
    assert len(ids) == 1


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_a_reset_forgets_what_nobody_uses_and_nothing_else(cache: str):
    memory, other = Memory(cache=cache), [7] * 12
    memory.run({0: 99}, [admit(0, PROMPT)])
    memory.run({1: 99}, [admit(1, other)])
    kept = 8 if cache == "radix" else 0
    memory.run({0: 1, 1: 1})
    memory.run({0: 1, 1: 1})
    memory.run({1: 1}, releases=[Release(0, True)])
    free, evictable = memory.manager.num_free, memory.manager.num_evictable
    assert (evictable > 0) == (cache == "radix")
    rows, _ = memory.run({1: 1, 2: 99}, [admit(2, PROMPT)], reset=True)  # amid equal decodes
    assert rows.cached.tolist() == [0], "what is admitted with the reset finds nothing"
    assert memory.manager.num_evicted == evictable and memory.manager.num_free < free + evictable
    rows, _ = memory.run({3: 99}, [admit(3, other)])
    assert rows.cached.tolist() == [kept], "a request that runs keeps its prompt"


@pytest.mark.parametrize("cache", ["radix", "naive"])
def test_a_half_computed_prompt_is_shared_as_far_as_it_has_come(cache: str):
    memory, prompt = Memory(cache=cache), list(range(20))
    memory.run({0: 10}, [admit(0, prompt)])
    found = 8 if cache == "radix" else 0
    rows, _ = memory.run({0: 6, 1: 99}, [admit(1, [*prompt[:14], 7, 7])], shares=[0])
    assert rows.cached.tolist() == [found], "two whole pages of ten tokens"
    rows, _ = memory.run({0: 6, 2: 99}, [admit(2, prompt)], shares=[0, 1])
    assert rows.cached.tolist() == [2 * found], "four of sixteen"
    memory.run({}, releases=[Release(slot, True) for slot in (0, 1, 2)])
    assert (
        memory.manager.num_free + memory.manager.num_evictable == memory.manager.allocator.num_pages
    )


def test_shares_amid_equal_decodes_are_carried_out():
    memory = Memory()
    memory.run({0: 99, 1: 8}, [admit(0, [9] * 9), admit(1, PROMPT)])
    memory.run({0: 1})
    rows, _ = memory.run({0: 1}, shares=[1])
    rows, _ = memory.run({0: 1, 2: 99}, [admit(2, PROMPT)])
    assert rows.cached.tolist() == [8]


def test_a_reset_without_rows_counts_in_the_digest():
    digests = set()
    for reset in (False, True):
        memory = Memory()
        memory.run({0: 99}, [admit(0, PROMPT)])
        memory.run({}, releases=[Release(0, True)])
        digests.add(memory.plan({}, reset=reset).digest)
    assert len(digests) == 2


def test_one_token_prompt_is_never_cached_away():
    memory = Memory()
    for _ in range(2):
        rows, ids = memory.run({0: 99}, [admit(0, [7])])
        assert rows.cached.tolist() == [0] and len(ids) == 1
        memory.run({}, releases=[Release(0, True)])


def test_pages_freed_while_a_step_is_in_flight_are_rewritten_only_after_it():
    """Pitfall 2: slot 0 ended, but step 1 still computes it when plan 2 gives its pages away."""
    memory = Memory(pages=5, cache="naive")
    first = memory.plan({0: 99}, [admit(0, PROMPT)])
    steps = [memory.step(first)]
    steps.append(memory.step(memory.plan({0: 1})))
    pages_of_1 = memory.heard.pages(steps[1], SIZE)
    other = [9] * 12
    third = memory.plan({1: 99}, [admit(1, other)], [Release(0, False)])
    steps.append(memory.step(third))
    pages_of_2 = memory.heard.pages(steps[2], SIZE)
    assert set(pages_of_2[0].tolist()) <= set(pages_of_1[0].tolist()), "the pages are reused"
    memory.device.run(steps[0])
    assert memory.holds(steps[1], 0, PROMPT)
    memory.device.run(steps[1])
    memory.device.run(steps[2])
    assert memory.holds(steps[2], 0, other)


def test_preempted_request_prefills_its_outputs_and_samples_once():
    """Pitfall 4: it has outputs and is in prefill all the same."""
    memory = Memory()
    outputs = memory.run({0: 99}, [admit(0, PROMPT)])[1]
    for _ in range(6):
        outputs += memory.run({0: 1})[1]
    tokens = PROMPT + outputs
    again = admit(3, tokens, prompt_len=len(PROMPT))
    rows, _ = memory.run({3: 1}, [again], [Release(0, True, pack(outputs))])
    assert rows.cached.tolist() == [16]  # 19 known, 18 computed
    assert rows.counts.tolist() == [1] and rows.samples.tolist() == [False]
    rows, ids = memory.run({3: 99})
    assert rows.counts.tolist() == [2] and len(ids) == 1
    assert memory.run({3: 99})[0].counts.tolist() == [1]


def test_surplus_token_never_enters_the_cache():
    """Pitfall 7: 15 tokens are confirmed; the 16th would have filled the page."""
    memory = Memory()
    outputs = memory.run({0: 99}, [admit(0, PROMPT)])[1]
    for _ in range(4):
        outputs += memory.run({0: 1})[1]
    confirmed = PROMPT + outputs[:3]
    memory.run({}, releases=[Release(0, True, pack(outputs[:3]))])
    assert (memory.manager.num_free, memory.manager.num_evictable) == (29, 3)
    for last in (outputs[3], outputs[3] + 1):
        rows, _ = memory.run({1: 99}, [admit(1, [*confirmed, last, 5])])
        assert rows.cached.tolist() == [12]
        memory.run({}, releases=[Release(1, False)])


def test_a_forgotten_request_leaves_nothing_of_its_path_in_the_cache():
    memory = Memory()
    outputs = memory.run({0: 99}, [admit(0, PROMPT)])[1]
    for _ in range(5):  # its prompt is shared meanwhile
        outputs += memory.run({0: 1})[1]
    memory.run({}, releases=[Release(0, False, pack(outputs[:5]), True)])
    assert (memory.manager.num_free, memory.manager.num_evictable) == (32, 0)
    rows, _ = memory.run({1: 99}, [admit(1, PROMPT)])
    assert rows.cached.tolist() == [0]


def test_forgetting_ends_where_somebody_else_goes_on():
    memory = Memory()
    other = [*PROMPT[:8], 1, 2, 3, 4, 5]
    memory.run({0: 99}, [admit(0, other)])
    memory.run({}, releases=[Release(0, True)])
    memory.run({0: 99, 1: 99}, [admit(0, PROMPT), admit(1, [*PROMPT, 9])])
    memory.run({0: 1, 1: 1})  # slot 1 holds all of slot 0's prompt from here on
    memory.run({}, releases=[Release(0, False, drop_prefix=True)])
    assert memory.run({0: 99}, [admit(0, [*PROMPT, 9])])[0].cached.tolist() == [12]
    memory.run(
        {}, releases=[Release(0, False, drop_prefix=True), Release(1, False, drop_prefix=True)]
    )
    rows, _ = memory.run({0: 99, 1: 99}, [admit(0, [*PROMPT, 9]), admit(1, other)])
    assert rows.cached.tolist() == [8, 12], "what the other one's path needs was left"


def test_a_forgotten_prompt_that_another_request_left_is_gone_too():
    """It was taken back before its logits were seen, so that its pages went into the cache."""
    memory = Memory()
    memory.run({0: 11}, [admit(0, PROMPT)])
    memory.run({}, releases=[Release(0, True)])
    memory.run({0: 99}, [admit(0, PROMPT)])
    assert memory.manager.num_evictable + memory.manager.cache.num_locked == 2
    memory.run({}, releases=[Release(0, False, drop_prefix=True)])
    assert memory.manager.num_free == 32


def test_pages_that_are_freed_unseen_are_zeroed_before_the_next_step_that_computes():
    memory = Memory(pages=12)
    memory.run({0: 99, 1: 99}, [admit(0, PROMPT), admit(1, [7] * 8)])
    owned = set(memory.manager.table.pages_of(0).tolist())
    kept = memory.plan({}, releases=[Release(1, True)])
    assert (
        kept.pages_to_zero.tolist() == [] and memory.step(kept).delta.pages_to_zero.tolist() == []
    )
    freed = memory.plan({}, releases=[Release(0, False)])
    assert set(freed.pages_to_zero.tolist()) == owned
    assert len(memory.step(freed).slots) == 0, "nothing is computed, so nothing is zeroed"
    later = memory.step(memory.plan({2: 99}, [admit(2, [5] * 30)]))
    assert set(later.delta.pages_to_zero.tolist()) == owned
    assert owned & set(later.delta.pages.tolist()), "and they are somebody's again"
    assert memory.step(memory.plan({2: 1})).delta.pages_to_zero.tolist() == []


def test_pages_of_a_prompt_that_was_preempted_are_zeroed_when_they_are_freed():
    """Nothing was sampled behind it, so nobody knows whether its keys and values are finite."""
    memory = Memory(pages=12)
    memory.run({0: 10}, [admit(0, PROMPT)])
    *cached, partial = memory.manager.table.pages_of(0).tolist()
    [whole] = [memory.plan({}, releases=[Release(0, True)])]
    assert whole.pages_to_zero.tolist() == [partial], "the cache has the others"
    assert set(memory.plan({}, reset=True).pages_to_zero.tolist()) == set(cached)


def test_pages_of_a_prompt_whose_logits_were_finite_are_not_zeroed():
    memory = Memory(pages=12)
    outputs = memory.run({0: 99}, [admit(0, PROMPT)])[1]
    freed = memory.plan({}, releases=[Release(0, True, pack(outputs))])
    assert freed.pages_to_zero.tolist() == []
    assert memory.plan({}, reset=True).pages_to_zero.tolist() == []


def test_pages_that_a_preempted_prompt_left_in_the_cache_are_proven_by_who_reads_them():
    memory = Memory(pages=12)
    memory.run({0: 10}, [admit(0, PROMPT)])
    cached = set(memory.manager.table.pages_of(0)[:2].tolist())
    memory.plan({}, releases=[Release(0, True)])
    rows, outputs = memory.run({1: 99}, [admit(1, PROMPT)])
    assert rows.cached.tolist() == [8] and set(memory.manager.table.pages_of(1)[:2]) == cached
    memory.plan({}, releases=[Release(1, True, pack(outputs))])
    assert memory.plan({}, reset=True).pages_to_zero.tolist() == []


def test_pages_of_requests_that_an_epoch_ends_under_are_zeroed_in_the_next():
    memory = Memory()
    memory.run({0: 99}, [admit(0, PROMPT)])
    owned = set(memory.manager.table.pages_of(0).tolist())
    memory.manager.reset()
    memory.number = 0
    step = memory.step(memory.plan({1: 99}, [admit(1, [5] * 8)]))
    assert set(step.delta.pages_to_zero.tolist()) == owned


def test_confirmed_page_is_cached_even_if_surplus_was_computed_after_it():
    memory = Memory()
    outputs = memory.run({0: 99}, [admit(0, PROMPT)])[1]
    for _ in range(6):
        outputs += memory.run({0: 1})[1]
    memory.run({}, releases=[Release(0, True, pack(outputs[:4]))])
    rows = memory.plan({1: 99}, [admit(1, [*PROMPT, *outputs[:4], 5])])
    assert rows.cached.tolist() == [16]
    assert memory.holds(memory.step(rows), 0, PROMPT + outputs[:4])


def test_last_output_without_kv_is_not_cached():
    """The output that filled the page was sampled, but no step computed its KV."""
    memory = Memory()
    outputs = memory.run({0: 99}, [admit(0, PROMPT)])[1]
    for _ in range(3):
        outputs += memory.run({0: 1})[1]
    memory.run({}, releases=[Release(0, True, pack(outputs))])
    rows, _ = memory.run({1: 99}, [admit(1, [*PROMPT, *outputs, 5])])
    assert rows.cached.tolist() == [12]


def test_half_computed_prompt_is_cached_as_far_as_it_goes():
    memory = Memory()
    memory.run({0: 9}, [admit(0, PROMPT)])
    rows, _ = memory.run({0: 99}, [admit(0, PROMPT)], [Release(0, True)])
    assert rows.cached.tolist() == [8]


def test_completed_prompt_is_shared_from_the_plan_after_the_next_one_on():
    memory = Memory()
    memory.run({0: 99, 1: 99}, [admit(0, PROMPT), admit(1, PROMPT)])
    assert memory.manager.num_free == 32 - 6, "in one plan the second cannot see the first"
    rows, _ = memory.run({2: 99}, [admit(2, [*PROMPT, 1])])
    assert rows.cached.tolist() == [0], "its result may be unknown yet"
    rows, _ = memory.run({3: 99}, [admit(3, [*PROMPT, 1])])
    assert rows.cached.tolist() == [12]
    assert memory.manager.num_free == 32 - 3 - 4 - 1, "the duplicates are freed"


def test_a_completed_prompt_that_turned_out_bad_is_never_shared():
    memory = Memory()
    memory.run({0: 99, 1: 99}, [admit(0, PROMPT), admit(1, PROMPT)])
    memory.run({0: 1, 1: 1})  # planned before anybody knew
    release = Release(0, False, drop_prefix=True), Release(1, False, drop_prefix=True)
    # The slot's next request has tokens that nobody has computed yet.
    other = [*PROMPT[:4], *range(8)]
    rows, _ = memory.run({0: 1}, [admit(0, other), admit(2, PROMPT)], release)
    assert rows.cached.tolist() == [0, 0]
    memory.run({0: 1})
    assert memory.manager.num_evictable + memory.manager.cache.num_locked == 0


def test_a_request_that_is_told_what_comes_computes_it_in_one_row():
    memory = Memory()
    _, (token,) = memory.run({0: 99}, [admit(0, PROMPT)])
    memory.run({0: 1})  # its own next token, which the plan behind it tells, too
    told = [token, 7, 8, 9, 10]
    rows = memory.plan({0: 99}, appends=[AppendTokens(0, pack(told))])
    step = memory.step(rows)
    assert (rows.starts.tolist(), rows.counts.tolist()) == ([13], [4])
    assert step.tokens.tolist() == told[1:] and step.samples.tolist() == [True]
    rows = memory.plan({0: 1})
    assert (rows.starts.tolist(), rows.counts.tolist()) == ([17], [1])


def test_a_prompt_is_shared_as_it_was_when_more_is_told_behind_it():
    """What was told may not be computed yet, or never."""
    memory = Memory()
    _, (token,) = memory.run({0: 99}, [admit(0, PROMPT)])
    told = [token, *range(20)]
    memory.plan({}, appends=[AppendTokens(0, pack(told))])
    memory.plan({})
    assert memory.manager.cache.num_locked == 3, "twelve tokens of a prompt, and no more"
    rows = memory.plan({1: 0}, [admit(1, [*PROMPT, *told, 1])])
    assert rows.cached.tolist() == [12]


def test_duplicates_are_repointed_and_freed():
    memory = Memory()
    admits = [admit(slot, PROMPT) for slot in range(3)]
    outputs = [memory.run({0: 99, 1: 99, 2: 99}, admits)[1]]
    outputs.append(memory.run({0: 1, 1: 1, 2: 1})[1])
    rows = memory.plan({0: 1, 1: 1, 2: 1})
    step = memory.step(rows)
    pages = memory.heard.pages(step, SIZE)
    assert (pages[:, :3] == pages[0, :3]).all()
    assert len(set(pages[:, 3].tolist())) == 3
    for row in range(3):
        assert memory.holds(step, row, PROMPT)
    memory.device.run(step)
    for row, slot in enumerate(step.slots.tolist()):
        assert memory.holds(step, row, [*PROMPT, outputs[0][slot], outputs[1][slot]])
    memory.run({}, releases=[Release(slot, False) for slot in range(3)])
    assert (memory.manager.num_free, memory.manager.num_evictable) == (29, 3)


def test_salts_do_not_share():
    memory = Memory()
    memory.run({0: 99}, [admit(0, PROMPT, cache_salt="a")])
    memory.run({})
    later = [admit(1, PROMPT), admit(2, PROMPT, cache_salt="b"), admit(3, PROMPT, cache_salt="a")]
    rows, _ = memory.run({}, later)
    assert rows.cached.tolist() == [0, 0, 8]


def test_row_without_pages_is_deferred_and_nothing_of_it_is_touched():
    memory = Memory(pages=5)
    memory.run({0: 99}, [admit(0, PROMPT)])
    rows = memory.plan({1: 99, 0: 1}, [admit(1, [1] * 8)])
    assert rows.deferred.tolist() == [True, False]
    assert rows.counts.tolist() == [0, 1]
    assert memory.manager.slots.num_projected[1] == 0 and memory.manager.table.num_pages[1] == 0
    memory.device.run(memory.step(rows))
    rows, ids = memory.run({1: 99}, releases=[Release(0, False)])
    assert rows.counts.tolist() == [8] and len(ids) == 1


def test_pages_go_to_rows_in_plan_order_and_smaller_rows_may_still_fit():
    memory = Memory(pages=6)
    admits = [admit(0, [1] * 8), admit(1, [2] * 16), admit(2, [3] * 4)]
    rows = memory.plan({0: 99, 1: 99, 2: 99}, admits)
    assert rows.deferred.tolist() == [False, True, False]


def test_unused_prefixes_make_room_and_used_ones_do_not():
    memory = Memory(pages=9)
    memory.run({0: 99}, [admit(0, PROMPT)])
    memory.run({}, releases=[Release(0, True)])
    memory.run({0: 99}, [admit(0, [*PROMPT, 1])])  # locks the three pages, owns a fourth
    rows, _ = memory.run({1: 99}, [admit(1, [2] * 17)])
    assert rows.deferred.tolist() == [True]
    rows, _ = memory.run({1: 99}, releases=[Release(0, False)])
    assert rows.counts.tolist() == [17]
    assert memory.manager.num_evictable == 3 and memory.manager.num_free == 0


def test_pages_that_had_to_go_are_counted_until_the_cache_is_empty_again():
    memory = Memory(pages=9)
    memory.run({0: 99}, [admit(0, PROMPT)])
    memory.plan({}, releases=[Release(0, True)])
    assert (memory.manager.num_evictable, memory.manager.num_evicted) == (3, 0)
    memory.run({1: 99}, [admit(1, [1] * 25)])  # seven pages of eight
    assert (memory.manager.num_evictable, memory.manager.num_evicted) == (1, 2)
    memory.manager.reset()
    assert memory.manager.num_evicted == 0


def test_prefix_of_a_request_admitted_ahead_is_kept_for_it():
    memory = Memory(pages=7)
    memory.run({0: 99}, [admit(0, PROMPT)])
    memory.run({}, releases=[Release(0, True)])
    rows, _ = memory.run({1: 99}, [admit(0, [*PROMPT, 1]), admit(1, [2] * 16)])
    assert rows.cached.tolist() == [12, 0]
    assert rows.deferred.tolist() == [True], "three pages free, three locked"
    rows = memory.plan({0: 99})
    assert rows.counts.tolist() == [1]
    assert memory.holds(memory.step(rows), 0, PROMPT)


def test_request_never_grows_past_max_total():
    memory = Memory()
    rows, _ = memory.run({0: 99}, [admit(0, PROMPT, max_total=14)])
    assert memory.run({0: 5})[0].counts.tolist() == [1]
    for _ in range(2):
        rows, ids = memory.run({0: 5})
        assert rows.counts.tolist() == [0] and ids == []
        assert rows.deferred.tolist() == [False]


def test_decodes_that_go_on_alike_end_at_the_shortest_limit():
    memory = Memory()
    memory.run({0: 99, 1: 99}, [admit(0, [1, 2, 3], max_total=9), admit(1, [4, 5], max_total=30)])
    for number in range(20):
        rows = memory.plan({0: 1, 1: 1})
        computed = [min(4 + number, 8), 3 + number]
        assert memory.manager.slots.num_projected[:2].tolist() == computed
        assert rows.counts.tolist() == [int(number < 5), 1]


def test_rows_of_empty_slots_and_empty_counts_do_nothing():
    memory = Memory()
    rows, _ = memory.run({5: 3, 0: 0}, [admit(0, PROMPT)])
    assert rows.counts.tolist() == [0, 0]
    assert memory.manager.num_free == 32


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"releases": [Release(1, True)]}, "release of slot 1, which is empty"),
        ({"releases": [Release(0, True), Release(0, True)]}, "slot 0, which is empty"),
        ({"releases": [Release(8, True)]}, "slot 8 of 8"),
        ({"releases": [Release(0, True, pack([1, 2]))]}, "confirms 2 outputs after 12"),
        ({"releases": [Release(0, True, b"xyz")]}, "3 bytes"),
        ({"admits": [admit(0, [1])]}, "slot 0, which is used"),
        ({"admits": [admit(-1, [1])]}, "slot -1 of 8"),
        ({"admits": [admit(1, [])]}, "0 tokens"),
        ({"admits": [admit(1, [1, -1])]}, "token id -1"),
        ({"admits": [admit(1, [1, 2], max_total=2)]}, "2 tokens, at most 2"),
        ({"admits": [admit(1, [1, 2], max_total=65)]}, "at most 65 in total, of at most 64"),
        ({"appends": [AppendTokens(1, pack([1]))]}, "extend of slot 1, which is empty"),
        ({"appends": [AppendTokens(0, b"")]}, "by 0 tokens, where 12 are known"),
        (
            {"appends": [AppendTokens(0, pack([1] * 52))]},
            "by 52 tokens, where 12 are known and at most",
        ),
        ({"appends": [AppendTokens(0, pack([1, -1]))]}, "token id -1"),
        ({"appends": [AppendTokens(0, b"xyz")]}, "3 bytes"),
        ({"shares": [1]}, "share of slot 1, which is empty"),
        ({"shares": [8]}, "share of slot 8 of 8"),
        ({"rows": {8: 1}}, "slots 8..8 of 8"),
        ({"rows": {-1: 1}}, "slots -1..-1 of 8"),
        ({"rows": {0: -1}}, "count -1"),
    ],
)
def test_contradiction_is_a_protocol_error_with_its_numbers(plan: dict, message: str):
    memory = Memory()
    memory.run({0: 99}, [admit(0, PROMPT)])
    with pytest.raises(ProtocolError, match=message):
        memory.plan(**{"rows": {}, **plan})


def test_slot_twice_in_a_plan_and_ragged_rows_are_protocol_errors():
    manager = Memory().manager
    with pytest.raises(ProtocolError, match="slot 3 twice"):
        manager.apply(Plan(1, 0, (), (), pack([1, 3, 3]), pack([1, 1, 1])))
    with pytest.raises(ProtocolError, match="2 slots, 1 counts"):
        manager.apply(Plan(1, 0, (), (), pack([1, 3]), pack([1])))


def test_lost_page_is_noticed_with_the_next_plan():
    memory = Memory()
    memory.manager.allocator.allocate(1)
    with pytest.raises(IntegrityError, match="31 free, 0 evictable, 0 locked and 0 held"):
        memory.plan({})


def test_page_with_two_owners_is_noticed():
    memory = Memory()
    memory.plan({0: 99, 1: 99}, [admit(0, PROMPT), admit(1, PROMPT)])
    rows = memory.manager.table._rows
    rows[1, 0] = rows[0, 0]
    with pytest.raises(IntegrityError, match="wrong"):
        memory.manager.check_integrity()


def test_digest_tells_different_decisions_apart_and_repeats():
    def digests(second_prompt: list[int]) -> list[int]:
        memory = Memory()
        plans = [memory.run({0: 99}, [admit(0, PROMPT)])[0]]
        memory.run({0: 1})
        plans.append(memory.run({0: 1, 1: 99}, [admit(1, second_prompt)])[0])
        plans.append(memory.run({1: 1}, releases=[Release(0, True)])[0])
        return [rows.digest for rows in plans]

    same, again, other = digests(PROMPT), digests(PROMPT), digests([1] * 12)
    assert same == again and len(set(same)) == 3
    assert same[0] == other[0] and same[1] != other[1] and same[2] != other[2]
    assert all(0 < digest < 2**64 for digest in same)


def test_reset_forgets_everything():
    memory = Memory()
    first = memory.run({0: 99}, [admit(0, PROMPT)])[0]
    memory.run({0: 1})
    memory.manager.reset()
    memory.number = 0
    memory.manager.check_integrity()
    assert (memory.manager.num_free, memory.manager.num_evictable) == (32, 0)
    again = memory.run({0: 99}, [admit(0, PROMPT)])[0]
    assert again.cached.tolist() == [0] and again.digest == first.digest


def test_unknown_cache_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match=r"--cache: .* is none of"):
        MemoryManager(8, 4, 2, 16, "lru")


def test_long_prompts_beside_decodes_get_the_pages_they_need():
    """Needs of 0, 1 and many pages in one plan go through one allocation."""
    memory = Memory()
    memory.run({0: 99, 1: 99}, [admit(0, PROMPT), admit(1, [1] * 5)])
    rows = memory.plan({2: 99, 0: 1, 1: 1, 3: 6}, [admit(2, [8] * 30), admit(3, [9] * 30)])
    step = memory.step(rows)
    assert step.slots.tolist() == [0, 1, 2, 3] and step.counts.tolist() == [1, 1, 30, 6]
    pages = memory.heard.pages(step, SIZE)
    used = [pages[row][: -(-n // SIZE)].tolist() for row, n in enumerate([13, 6, 30, 6])]
    flat = np.concatenate(used)
    assert len(set(flat.tolist())) == len(flat) == 4 + 2 + 8 + 2
    memory.device.run(step)
    assert memory.holds(step, 2, [8] * 30) and memory.holds(step, 3, [9] * 6)


def links(*plans: list[list[int]]) -> list[int]:
    digest, closed = RunningDigest(), []
    for plan in plans:
        for decision in plan:
            digest.add(np.array(decision, dtype=np.int32))
        closed.append(digest.close())
        assert digest.value == closed[-1]
    return closed


def test_the_same_numbers_in_other_decisions_are_another_digest():
    assert links([[1, 2]]) == links([[1, 2]])
    assert len({*links([[1, 2]]), *links([[1], [2]]), *links([[1, 2], []])}) == 3


def test_a_link_depends_on_those_before_it():
    assert links([[1]], [[2]])[1] != links([[3]], [[2]])[1]
    assert links([], [[2]])[1] != links([[2]])[0]

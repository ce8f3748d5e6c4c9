"""Prompts that begin alike: one computes the beginning, the others are held for its pages."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_families import WAYS, started
from test_scheduler_core import pipeline

from pipeinfer.messages import Abort, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.queue import PrefixesInProgress
from pipeinfer.scheduler.request import request_of
from pipeinfer.wire import pack


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(WAYS[0]), st.sampled_from(WAYS[1]), st.integers(1, 50), st.integers(1, 9),
    st.integers(2, 6), st.sampled_from([1, 4]), st.sampled_from([3, 16, 200]),
)  # fmt: skip
def test_a_common_beginning_is_computed_once(policy, depth, common, own, many, size, budget):
    p = started(policy=policy, depth=depth, page_size=size, budget=budget, common=1)
    for other in range(many):
        p.submit([1] * common + [10 + other] * own, 5)
    p.settle()
    whole = common // size * size
    assert p.engine.prefilled == common + own + (many - 1) * (common - whole + own)
    assert p.core.stats()["held"] == 0


def test_who_waits_does_not_wait_for_the_whole_prompt():
    p = started(budget=16, common=16)
    p.submit([1] * 48 + [2] * 160, 5)
    p.submit([1] * 48 + [3] * 8, 5)
    assert p.core.stats()["held"] == 1
    while p.core.stats()["held"]:
        p.deliver()
    assert p.engine.prefilled <= 64
    p.settle()


def test_beginnings_within_beginnings_are_each_computed_once():
    """A system prompt under all, documents under some."""
    p = started(budget=64, common=8, policy="prefill-first")
    system, documents = [1] * 16, ([2] * 32, [3] * 32)
    for other in range(8):
        p.submit(system + documents[other % 2] + [10 + other] * 4, 3)
    p.settle()
    assert p.engine.prefilled == 16 + 2 * 32 + 8 * 4


def test_short_common_beginnings_hold_nobody():
    p = started(budget=64, common=64)
    for other in range(4):
        p.submit([1] * 63 + [10 + other] * 9, 3)
    assert p.core.stats()["held"] == 0
    p.settle()


def test_who_is_more_urgent_does_not_wait():
    p = started(budget=8, common=8)
    p.submit([1] * 64, 3, priority=5)
    p.submit([1] * 64, 3, priority=1)
    assert p.core.stats()["held"] == 0
    p.submit([1] * 64, 3, priority=7)
    assert p.core.stats()["held"] == 1
    p.settle()


def test_when_the_one_who_computes_it_leaves_the_next_does():
    p = started(budget=8, common=8)
    names = [p.submit([1] * 64 + [10 + other] * 8, 3) for other in range(4)]
    for name in names[:2]:
        p.clients[name].cut = 0
        p.feed(Abort(name, 1))
        assert p.core.stats()["held"] == 3 - 1 - names.index(name)
        p.deliver()
    p.settle()
    assert p.engine.prefilled < 64 + 2 * 8 + 2 * 8 + 8


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_crash_leaves_nobody_waiting(crashes):
    p = started(budget=8, common=8)
    for other in range(4):
        p.submit([1] * 64 + [10 + other] * 8, 3)
    for _ in range(crashes):
        p.deliver()
        p.engine.crash()
        while p.engine.outbox and not p.engine.slots:
            p.deliver()
    p.settle()
    assert all(client.finish for client in p.clients.values())


def test_salts_and_prompts_with_log_probs_share_nothing():
    core = SchedulerCore(SchedulerOptions("mixed", 2, 8, 64, least_shared_tokens=1))
    p = pipeline(common=1)
    p.core = core
    p.deliver()
    p.deliver()
    ways = ({}, {"cache_salt": "x"}, {"params": RequestParams(prompt_logprobs=1)})
    for at, more in enumerate(ways):
        params = more.pop("params", RequestParams())
        work = TokenizedRequest(f"r{at}", 1, 0, 0, pack([1] * 12), params, 0, **more)
        core.handle(work, 0.0)
    assert core.stats()["held"] == 0


def test_memory_has_room_for_many_that_share_a_beginning():
    """Sixteen pages of a beginning, and of each of six one or two more."""
    p = pipeline(pages=30, page_size=4, slots=8, budget=16, common=16)
    for other in range(6):
        p.submit([1] * 64 + [10 + other] * 3, 4)
    assert p.most_at_once() == 6, "they run beside each other"
    p.settle()
    assert p.engine.deferred == 0 and p.core.counts["preemptions"] == 0


def test_plans_share_only_where_somebody_is_admitted():
    p = started(budget=16, common=16)
    plans = p.watched()
    for other in range(3):
        p.submit([1] * 48 + [10 + other] * 4, 9)
    p.settle()
    sharing = [plan for plan in plans if plan.cache_slots]
    assert sharing and all(plan.admits for plan in sharing)


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=9)


@settings(deadline=None)
@given(prompts, st.lists(st.integers(0, 8), max_size=20), st.integers(1, 3))
def test_waiting_never_goes_in_a_circle_and_nothing_is_left(asked, over, grain):
    """Whoever is held waits, perhaps over others, for one that is not."""
    held = PrefixesInProgress()
    held.begin(grain)
    live, waiting = [], set()

    def want(request):
        if held.park_if_blocked(request):
            waiting.add(request.id)
        else:
            waiting.discard(request.id)
            if request.phase != "waiting":
                request.move("waiting")

    def check():
        assert len(held) == len(waiting)
        for request in live:
            seen = []
            while request.id in waiting:
                assert request.id not in seen and request.prefix_source in live
                seen.append(request.id)
                request = request.prefix_source

    for at, prompt in enumerate(asked):
        work = TokenizedRequest(f"r{at}", 1, 0, 0, pack(prompt), RequestParams(), 0)
        live.append(request_of(work, at, 0.0))
        want(live[-1])
        check()
    for at in [*over, *range(len(asked))]:
        gone = next((r for r in live if r.id == f"r{at}"), None)
        if gone is None:
            continue
        live.remove(gone)
        waiting.discard(gone.id)
        gone.move("finished")
        for request in held.on_finished(gone):
            want(request)
        check()
    for rest in list(live):
        live.remove(rest)
        waiting.discard(rest.id)
        rest.move("finished")
        for request in held.on_finished(rest):
            want(request)
    assert not held._leaders and not held._keys and not held._waiting and not held._blocks_led


def test_one_key_of_each_grain():
    found = PrefixesInProgress()
    found.begin(4)
    request = request_of(
        TokenizedRequest("r", 1, 0, 0, pack(range(13)), RequestParams(), 0), 0, 0.0
    )
    assert not found.park_if_blocked(request)
    keys = found._keys["r"]
    assert len(keys) == 3 and len(list(groupby(keys))) == 3

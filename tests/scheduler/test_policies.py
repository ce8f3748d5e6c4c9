"""What one step takes and gives back, request by request, in a composer without an engine."""

from __future__ import annotations

import pytest
from test_memory_runs_short import SIZE, running, work

from pipeinfer import settings
from pipeinfer.scheduler.engine_state import PageCredits, Slots
from pipeinfer.scheduler.policies import MAX_JUMPS, StepComposer, create
from pipeinfer.scheduler.queue import WaitingQueue
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.step_cost import PrefillBudget, Prompt

BUDGET = 64


class Spare(PrefillBudget):
    """So many tokens of prompts, whatever decodes. asked: what it was asked."""

    def __init__(self, spare: int, cheapest: int = 0) -> None:
        super().__init__(0)
        for name, value in (("spare", spare), ("least", cheapest), ("asked", [])):
            object.__setattr__(self, name, value)

    def prompt_tokens(self, *asked):
        self.asked.append(asked)
        return self.spare

    def best_rate_prompt_tokens(self, *asked):
        self.asked.append(asked)
        return self.least


def composer(
    requests: list[Request], pages: int = 100, *, spare=BUDGET, queue=None, free=8, budget=BUDGET,
    nothing_in_flight=False,
) -> StepComposer:  # fmt: skip
    slots = Slots()
    slots.begin(free, PageCredits(SIZE, pages))
    slots.running = {request.id: request for request in requests}
    slots.forced_ahead = {
        request.id: request
        for request in requests
        if not request.prefilling and request.num_forced_ahead > 1
    }
    prefill = spare if isinstance(spare, PrefillBudget) else Spare(spare)
    queue = WaitingQueue() if queue is None else queue
    return StepComposer(slots, queue, budget, prefill, 0.0, nothing_in_flight)


def waiting(*tokens: int) -> WaitingQueue:
    queue = WaitingQueue()
    for n, many in enumerate(tokens):
        queue.push(request_of(work(f"w{n}", many), n, 0.0))
    return queue


def test_pages_are_what_a_plan_takes_less_what_it_takes_back():
    decodes = [running(f"r{n}", n, 8, 8) for n in range(3)]
    short = composer(decodes, pages=0)
    short.decode_all()
    assert short.preempted == [decodes[2]], "its two pages are enough for the others"
    assert short.pages.taken == 2 - 2
    enough = composer(decodes, pages=3)
    enough.decode_all()
    assert (enough.preempted, enough.pages.taken) == ([], 3)


def test_pages_from_the_cache_are_not_given_back_by_who_only_shares_them():
    decodes = [running(f"r{n}", n, 8, 8) for n in range(3)]
    decodes[2].cache_hit = 8
    short = composer(decodes, pages=0)
    short.decode_all()
    assert short.preempted == [decodes[2], decodes[1]]


def test_a_prompt_waits_where_there_is_no_page():
    prompt = running("prompt", 0, 40, 20)
    short = composer([prompt], pages=0)
    short.continue_prompts()
    assert (short.rows, short.pages.taken) == ([], 0)
    short = composer([prompt], pages=2)
    short.continue_prompts()
    assert (short.rows, short.pages.taken) == ([(prompt, 2 * SIZE)], 2)


@pytest.mark.parametrize("pages", [0, 1, 2])
def test_a_prompt_in_the_middle_of_a_page_gets_the_rest_of_it_and_all_pages_that_are_left(pages):
    prompt = running("prompt", 0, 40, 2 * SIZE + 1)
    short = composer([prompt], pages=pages)
    short.continue_prompts()
    assert (short.rows, short.pages.taken) == ([(prompt, SIZE - 1 + pages * SIZE)], pages)


def test_prompts_get_what_the_decodes_can_bear():
    decode, prompt = running("decode", 0, 8, 8), running("prompt", 1, 200, 20)
    spare = Spare(5)
    step = composer([decode, prompt], spare=spare)
    step.decode_all()
    step.limit_prefill()
    step.continue_prompts()
    assert step.rows == [(decode, 1), (prompt, 5)]
    assert spare.asked == [(1, 8, [Prompt(180, 20)])]


def test_prompts_get_what_costs_least_where_that_is_asked_for():
    """Then what waits in the queue counts, and how long the decodes still take, if all fit."""
    decode, prompt = running("decode", 0, 8, 8), running("prompt", 1, 200, 20)
    for free, left in ((1, 50), (0, 0)):
        spare = Spare(5, cheapest=7)
        step = composer([decode, prompt], spare=spare, queue=waiting(9), free=free)
        step.decode_all()
        step.limit_prefill(best_rate=True)
        step.continue_prompts()
        assert step.rows == [(decode, 1), (prompt, 7)]
        assert spare.asked == [(1, 8, [Prompt(180, 20), Prompt(9)], left)]


def ahead(name: str, arrival: int, known: int) -> Request:
    """One of which so many ids are known behind what was computed."""
    request = running(name, arrival, 8, 8)
    request.outputs.extend(range(known))
    return request


def jumped(requests: list[Request], spare: int, **options) -> list[int]:
    """How many tokens each of them gets, where others can bear so many."""
    step = composer(requests, spare=spare, **options)
    step.decode_all()
    assert [request for request, _ in step.rows] == requests
    assert [step.jumps(*row) for row in step.rows] == [count > 1 for _, count in step.rows]
    return [count for _, count in step.rows]


def test_who_is_ahead_goes_on_by_all_that_is_known():
    assert jumped([ahead("a", 0, 9), ahead("b", 1, 1), ahead("c", 2, 4)], 50) == [9, 1, 4]


def test_jumps_are_as_long_as_the_others_can_bear_and_the_first_comes_first():
    assert jumped([ahead("a", 0, 9), ahead("b", 1, 9), ahead("c", 2, 9)], 11) == [9, 4, 1]


def test_jumps_leave_prompts_half_of_what_others_can_bear():
    runs = [ahead("a", 0, 30), running("prompt", 1, 60, 20)]
    step = composer(runs, spare=16)
    step.decode_all()
    step.limit_prefill()
    step.continue_prompts()
    assert step.rows == [(runs[0], 1 + 8), (runs[1], 8)]


def test_a_queue_that_nobody_can_leave_takes_nothing_from_jumps():
    """All slots are taken."""
    runs = [ahead("a", 0, 30)]
    full = composer(runs, spare=16, queue=waiting(9), free=0)
    full.decode_all()
    assert full.rows == [(runs[0], 1 + 16)]


def test_who_jumps_takes_pages_and_decodes_where_there_are_none():
    """Eight computed tokens fill two pages; the next one needs one, nine need three."""
    short, enough = [jumped([ahead("a", 0, 9)], 50, pages=pages) for pages in (2, 3)]
    assert (short, enough) == ([1], [9])


def test_not_more_jump_than_graphs_have_room_for():
    runs = [ahead(f"r{n}", n, 2) for n in range(MAX_JUMPS + 3)]
    assert jumped(runs, 50, budget=500) == [2] * MAX_JUMPS + [1] * 3


@pytest.mark.parametrize("runs", [[], [running("prompt", 0, 200, 20)]])
def test_where_nobody_decodes_nobody_is_asked_what_decodes_can_bear(runs):
    spare = Spare(0)
    step = composer(runs, queue=waiting(9), spare=spare)
    step.decode_all()
    step.limit_prefill()
    step.continue_prompts()
    step.admit_while_possible()
    assert sum(count for _, count in step.rows) == (BUDGET if runs else 9)
    assert spare.asked == []


def test_a_prompt_of_one_token_left_takes_the_last_of_the_budget():
    prompts = [running("long", 0, BUDGET - 1, 0), running("short", 1, 9, 8)]
    step = composer(prompts)
    step.continue_prompts()
    assert step.rows == [(prompts[0], BUDGET - 1), (prompts[1], 1)]


def test_who_is_admitted_leaves_a_page_for_each_to_grow_into():
    """Two run and may each want a page: of five, three are left for a prompt."""
    for tokens, admitted in ((3 * SIZE, 1), (3 * SIZE + 1, 0)):
        step = composer([running(f"r{n}", n, 6, 6) for n in range(2)], 5, queue=waiting(tokens))
        step.admit_while_possible()
        assert len(step.admitted) == admitted, tokens


def test_relief_takes_the_latest_back_and_never_the_last():
    runs = [running(f"r{n}", n, 8, 8) for n in range(2)]
    step = composer(runs)
    step.preempt_one()
    step.preempt_one()
    assert step.preempted == [runs[1]]
    alone = composer(runs[:1])
    alone.preempt_one()
    assert alone.preempted == []


def test_who_runs_alone_takes_the_pages_of_as_many_as_it_needs():
    runs = [running(f"r{n}", n, 8, 8) for n in range(3)]
    suspect = request_of(work("suspect", 16), 9, 0.0)
    suspect.max_total = 60
    step = composer(runs, pages=1)
    step.run_alone(suspect)
    assert step.preempted == [runs[2], runs[1]], "two pages each, and one was there"
    assert step.rows == [(suspect, 16)]


def test_who_runs_alone_gets_the_only_slot():
    other = running("other", 0, 8, 8)
    suspect = request_of(work("suspect", 16), 9, 0.0)
    suspect.max_total = 60
    step = composer([other], free=0)
    step.run_alone(suspect)
    assert step.preempted == [other] and step.rows == [(suspect, 16)]


def test_an_admission_counts_the_pages_of_requests_that_are_left_out():
    """They hold slots, have no part in the step, and grow later."""
    suspect = running("suspect", 0, 8, 8)
    step = composer([suspect], pages=2, queue=waiting(8))
    step.leave_out(suspect)
    step.admit_while_possible()
    assert step.rows == [] and step.admitted == []
    enough = composer([suspect], pages=3, queue=waiting(8))
    enough.leave_out(suspect)
    enough.admit_while_possible()
    assert len(enough.admitted) == 1


def test_who_runs_alone_and_decodes_gets_one_token():
    suspect = running("suspect", 0, 8, 8)
    step = composer([suspect])
    step.run_alone(suspect)
    assert (step.rows, step.pages.taken) == ([(suspect, 1)], 1)


def test_decodes_that_find_no_page_wait_for_steps_in_flight():
    """Prompts that are older give nothing back, so one of the decodes has to wait."""
    runs = [running("inside", 0, 7, 7), running("at its end", 1, 8, 8)]
    step = composer([*runs[:1], running("prompt", 2, 40, 20)], pages=0)
    step.decode_all()
    assert step.rows == [(runs[0], 1)], "its page has room"
    alone = composer(runs[1:], pages=0)
    alone.decode_all()
    assert alone.rows == []
    desperate = composer(runs[1:], pages=0, nothing_in_flight=True)
    desperate.decode_all()
    assert desperate.rows == [(runs[1], 1)], "with nothing in flight the engine decides"


def test_a_prompt_for_which_others_give_way_takes_their_pages_in_the_same_step():
    decode, prompt = running("decode", 5, 8, 8), running("prompt", 0, 40, 20)
    step = composer([decode, prompt], pages=0, nothing_in_flight=True)
    step.continue_prompts()
    assert step.preempted == [decode]
    assert step.rows == [(prompt, 2 * SIZE)]


def test_nobody_counts_on_the_pages_of_who_gives_way_in_the_same_step():
    oldest, leader = running("oldest", 0, 8, 8), running("leader", 1, 16, 17)
    leader.computed = 16
    follower = request_of(work("follower", 16), 2, 0.0)
    follower.prefix_source = leader
    assert leader.provides_prefix and follower.prefix_tokens == 15
    step = composer([oldest, leader])
    assert step._known_cache_hit(follower) == 12, "of whole pages"
    step._preempt(leader)
    assert step._known_cache_hit(follower) == 0


@pytest.mark.parametrize("name", settings.POLICIES)
def test_every_policy_of_the_settings_can_be_made(name):
    assert callable(create(name).compose)

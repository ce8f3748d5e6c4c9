"""Steps in flight: what an engine says of one is what may be, or it ends the epoch and no stage."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from test_scheduler_core import Pipeline, pipeline

from pipeinfer.messages import (
    Admitted,
    Digests,
    GrammarCompiled,
    Message,
    PromptLogprobs,
    Ready,
    Result,
    TokenizedRequest,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.scheduler.engine_state import EngineState, PageCredits, StepsInFlight
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.wire import logprob_bytes, pack

MANY = 2**31 - 1

WRONG_RESULTS: dict[str, tuple[dict[str, Any], str]] = {
    "rows that its plan has not": ({"slots": pack([7, 1]), "starts": pack([0, 0]),
                                    "counts": pack([5, 1]), "produced": pack([1, 0])},
                                   "slots [7, 1], of [7] in the plan"),
    "a row of another slot": ({"slots": pack([3])}, "slots [3], of [7]"),
    "no rows": (dict.fromkeys(("slots", "starts", "counts", "produced"), b""), "slots [], of [7]"),
    "arrays of different lengths": ({"starts": b""}, "4, 0, 4, 4 bytes"),
    "a part of a number": ({"slots": b"abc"}, "3, 4, 4, 4 bytes"),
    "a part of an id": ({"token_ids": bytes(5)}, "5 bytes"),
    "a part of a deferred slot": ({"deferred": bytes(3)}, "3 bytes"),
    "fewer ids than it says": ({"token_ids": b""}, "produced 1 ids and 0 were sent"),
    "more ids than it says": ({"token_ids": pack([1, 2])}, "produced 1 ids and 2 were sent"),
    "ids by halves": ({"produced": pack([-1]), "token_ids": b""}, "is -1"),
    "an id below 0": ({"token_ids": pack([-5])}, "is -5"),
    "a beginning below 0": ({"starts": pack([-3])}, "is -3"),
    "an end behind all": ({"counts": pack([400])}, "where 5 are known"),
    "an end beyond int32": ({"starts": pack([MANY]), "counts": pack([MANY])}, "where 5 are known"),
    "an end behind what is known": ({"counts": pack([9])}, "1 ids of r0 behind 9 tokens, where 5"),
    "no token where one is due": ({"produced": pack([0]), "token_ids": b""},
                                  "0 ids of r0 behind 5 tokens"),
    "somebody else's troubles": ({"bad": pack([2])}, "slots [2] are reported as deferred"),
    "somebody else's refusal": ({"refused": {4: "dead"}}, "slots [4] are reported as deferred"),
    "log-probs that nobody wants": ({"logprobs": bytes(8)}, "8 bytes of log-probs, not 0"),
    "more pages than there are": ({"free": 39, "evictable": 2}, "of 40 pages"),
    "more pages evicted than ever were there": ({"evicted": 81}, "81 are evicted"),
    "pages below 0": ({"free": 5, "evictable": -1}, "-1 evictable"),
}  # fmt: skip
WRONG_ADMISSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "arrays of different lengths": ({"cached": b""}, "4, 0 bytes"),
    "a part of a number": ({"slots": bytes(6), "cached": bytes(6)}, "6, 6 bytes"),
    "somebody whom it has not admitted": ({"slots": pack([2])}, "tokens for slot 2"),
    "less than nothing from the cache": ({"cached": pack([-4])}, "-4 tokens for slot 7"),
    "more from the cache than there may be": ({"cached": pack([400])}, "400 tokens"),
    "a plan that was never published": ({"number": 9}, "the newest plan is 1"),
    "pages that there are not": ({"free": 41}, "of 40 pages"),
}


def first(p: Pipeline, kind: type[Message]) -> Message:
    """The first message of that kind that the engine sends; those before it are delivered."""
    while not isinstance(p.engine.outbox[0], kind):
        p.deliver()
    return p.engine.outbox.popleft()


def begun(**fields: Any) -> Pipeline:
    """A request of five tokens in slot 7; its plan was published, and the one behind it."""
    p = pipeline(overtakes=lambda _results: 0, **fields)
    p.deliver()
    p.deliver()
    p.submit([1, 2, 3, 4, 5], 8)
    return p


def ends_the_epoch(p: Pipeline, message: Message, said: str) -> None:
    sends = p.feed(message)
    state, reason = p.core.state()
    assert state == "waiting" and said in reason, reason
    assert not any(client.outputs for client in p.clients.values()), sends
    p.settle()
    assert p.core.stats()["epochs_total"] == 2
    assert p.core.stats()["failed_total"] == 0, "nobody who asked is to blame"


@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_a_result_that_cannot_be_ends_its_epoch_with_its_numbers(case):
    fields, said = WRONG_RESULTS[case]
    p = begun()
    ends_the_epoch(p, replace(first(p, Result), **fields), said)


@pytest.mark.parametrize("case", WRONG_ADMISSIONS)
def test_an_admission_that_cannot_be_ends_its_epoch_with_its_numbers(case):
    fields, said = WRONG_ADMISSIONS[case]
    p = begun()
    ends_the_epoch(p, replace(first(p, Admitted), **fields), said)


def test_an_admission_whose_result_has_come_is_late_and_changes_nothing():
    p = begun()
    late = first(p, Admitted)
    while p.core.stats()["in_flight"] and not p.clients["r0"].outputs:
        p.deliver()
    request = p.core._live["r0"]
    before = request.cache_hit, request.computed, p.core._engine.slots.credits.available
    p.feed(replace(late, cached=pack([4])))
    assert before == (request.cache_hit, request.computed, p.core._engine.slots.credits.available)
    p.settle()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logprobs": bytes(5)}, "5 bytes of log-probs from token 1 on, of 8 bytes"),
        ({"first": 9}, "from token 9 on, where 1 are known"),
        ({"logprobs": bytes(8 * 9)}, "for each of 3 tokens"),
        ({"slot": 3}, "no row of slot 3"),
        ({"number": 4}, "result 4 came"),
    ],
)
def test_log_probs_that_cannot_be_of_its_prompt_end_the_epoch(fields, said):
    right = PromptLogprobs(epoch=1, number=0, slot=7, first=1, logprobs=bytes(16))
    p = prompt_with_logprobs()
    p.feed(right)
    assert p.core.state()[0] == "ready", "these are"
    p = prompt_with_logprobs()
    p.feed(replace(right, **fields))
    state, reason = p.core.state()
    assert state == "waiting" and said in reason, reason


def prompt_with_logprobs() -> Pipeline:
    p = pipeline()
    p.deliver()
    p.deliver()
    params = RequestParams(max_tokens=4, prompt_logprobs=0)
    p.core.handle(TokenizedRequest("r", 1, 0, 0, pack([1, 2, 3]), params, 0), 0.0)
    return p


def test_digests_that_are_no_whole_numbers_end_the_epoch():
    p = pipeline()
    p.core = SchedulerCore(SchedulerOptions("mixed", 2, 8, 16, tp=2))
    for rank in (0, 1):
        p.core.handle(replace(p.engine.hello(), rank=rank, tp=2, incarnation=rank + 1), 0.0)
    for rank in (0, 1):
        p.core.handle(Ready(epoch=1, rank=rank, incarnation=rank + 1), 0.0)
    assert p.core.state()[0] == "ready"
    p.core.handle(Digests(epoch=1, rank=1, first=0, values=bytes(12)), 0.0)
    assert p.core.state()[0] == "waiting" and "12 bytes" in p.core.state()[1]


def test_a_preparation_of_a_rank_that_there_is_not_is_nothing():
    p = pipeline()
    p.deliver()
    p.deliver()
    p.submit([1, 2], 3, grammar="a")
    for rank in (-1, 1, 7):
        p.feed(GrammarCompiled(rank=rank, incarnation=1, request_id="r0"))
    assert p.core.stats()["preparing"] == 1
    p.settle()


def flown(logprobs: int | None = None) -> tuple[StepsInFlight, Request]:
    """A request of five tokens in slot 2, whose step 0 is in flight, and step 1 behind it."""
    flights, params = StepsInFlight(), RequestParams(max_tokens=20, logprobs=logprobs)
    request = request_of(TokenizedRequest("r", 1, 0, 0, pack(range(5)), params, 0), 1, 0.0)
    request.max_total, request.slot, request.phase = 25, 2, "running"
    request.admit()
    for number, count in enumerate((5, 1)):
        flights.add(number, [(request, count)], 0.0)
    return flights, request


def said(number: int, start: int, count: int, ids: list[int], logprobs: bytes = b"") -> Result:
    return Result(
        epoch=1, number=number, slots=pack([2]), starts=pack([start]), counts=pack([count]),
        produced=pack([len(ids)]), token_ids=pack(ids), deferred=b"", free=1, evictable=0,
        digest=0, logprobs=logprobs,
    )  # fmt: skip


def test_ids_that_come_again_are_skipped_with_their_log_probs():
    """The step in flight samples what the one before it has forced already."""
    flights, request = flown(logprobs=0)
    logprobs = [bytes([n]) * logprob_bytes(0) for n in range(5)]
    [(_, tokens, told, _)] = flights.process_result(
        said(0, 0, 5, [10, 11], logprobs[0] + logprobs[1])
    )
    assert (tokens, told) == ([10, 11], logprobs[0] + logprobs[1])
    request.append(tokens, told)
    [(_, tokens, told, _)] = flights.process_result(
        said(1, 5, 1, [11, 12], logprobs[1] + logprobs[2])
    )
    assert (tokens, told) == ([12], logprobs[2])
    request.append(tokens, told)
    assert request.logprobs == b"".join(logprobs[:3])


@pytest.mark.parametrize("trouble", [{"refused": {2: "dead"}}, {"bad": pack([2])}])
def test_rows_behind_the_trouble_of_a_request_that_was_taken_back_end_no_epoch(trouble):
    """It is computed again, and fails when it runs; they know of a token that it has not."""
    flights, request = flown(logprobs=None)
    list(flights.process_result(said(0, 0, 5, [10])))
    request.append([10], b"")
    flights.add(2, [(request, 1)], 0.0)
    request.phase = "waiting"
    assert list(flights.process_result(replace(said(1, 5, 1, []), **trouble))) == []
    assert list(flights.process_result(replace(said(2, 6, 1, []), **trouble))) == []
    assert len(flights) == 0 and list(request.outputs) == [10]


def hit_of(flights: StepsInFlight, cached: int) -> list[tuple[int, int]]:
    return flights.on_admitted(
        Admitted(
            epoch=1, number=0, slots=pack([2]), cached=pack([cached]), free=1, evictable=0
        )
    )  # fmt: skip


def test_what_the_cache_had_counts_for_the_admission_that_it_was_said_of():
    flights, request = flown()
    hit_of(flights, 4)
    assert (request.first_cache_hit, request.cache_hit, request.computed, request.projected) == (
        4,
        4,
        4,
        6,
    )

    flights, request = flown()
    request.admit()  # admitted anew, into the same slot
    hit_of(flights, 4)
    assert (request.first_cache_hit, request.cache_hit, request.computed) == (4, 0, 0)

    flights, request = flown()
    request.free_slot()
    hit_of(flights, 4)
    assert (request.first_cache_hit, request.cache_hit, request.computed) == (4, 0, 0)


def test_a_hit_that_lets_a_prompt_grow_further_than_its_plans_counted_takes_its_pages():
    """Of a prompt of 5 the chunks 3 and 2 are in flight: the cache has 4, so the first chunk ends
    it, and the second decodes."""
    flights, request = flown()
    assert hit_of(flights, 0) == []
    chunks = EngineState(1)
    chunks.slots.begin(3, PageCredits(page_size=1, pages=40))
    request = flown()[1]
    for number, count in enumerate((3, 2)):
        chunks.in_flight.add(number, [(request, count)], 0.0)
        chunks.slots.credits.reserve(number, count)
    request.counts_in_flight[:] = [3, 2]
    request.replay_in_flight(0)
    told = Admitted(
        epoch=1, number=0, slots=pack([2]), cached=pack([4]), free=35, evictable=0
    )  # fmt: skip
    chunks.on_admitted(told)
    assert request.projected == 6
    assert chunks.slots.credits.available == 35 - 2 - 1, "for the second chunk, and one token more"

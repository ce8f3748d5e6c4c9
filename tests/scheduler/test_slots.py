"""Slots: who holds one, what is given back with the next plan, and what of it may be kept."""

from __future__ import annotations

import pytest

from pipeinfer.messages import Admitted, Release, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.engine_state import PageCredits, Slots
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.wire import pack

SIZE, PAGES = 4, 20


def slots(count: int = 3) -> Slots:
    made = Slots()
    made.begin(count, PageCredits(SIZE, PAGES))
    return made


def waiting(
    name: str = "r", tokens: int = 6, stops: tuple[int, ...] = (), least: int = 0
) -> Request:
    params = RequestParams(max_tokens=9, min_tokens=least, stop_token_ids=stops)
    request = request_of(TokenizedRequest(name, 1, 0, 0, pack(range(tokens)), params, 0), 1, 0.0)
    request.max_total = tokens + 9
    request.move("waiting")
    request.admit()
    return request


def computed(request: Request, outputs: list[int]) -> None:
    """Its prompt, and all outputs but the last."""
    request.outputs.extend(outputs)
    request.computed = request.projected = request.length - bool(outputs)


def test_who_is_admitted_holds_a_slot_until_it_is_released_with_a_plan():
    some, requests = slots(), [waiting(name) for name in "abc"]
    given = [admit.slot for admit in some.admit(requests)]
    assert sorted(given) == [0, 1, 2] and some.free == 0
    assert list(some.running.values()) == requests
    some.release(requests[1])
    assert (some.free, some.releasing, requests[1].slot) == (1, True, -1)
    [released] = some.take_releases()
    assert released.slot == given[1] and not some.releasing and some.free == 1
    [again] = some.admit([waiting("d")])
    assert again.slot == given[1]


def test_what_an_engine_was_not_told_comes_with_the_release():
    some, request = slots(), waiting()
    some.admit([request])
    computed(request, [7, 8, 9])
    request.move("finished")
    some.release(request)
    assert some.take_releases() == (Release(slot=2, cache_prefix=True, output_ids=pack([7, 8, 9])),)


@pytest.mark.parametrize("spoiled", [True, False])
def test_of_what_nobody_may_reuse_nothing_is_kept(spoiled):
    """Bad logits; or a prompt whose logits nobody has seen, because its client left."""
    some, request = slots(), waiting()
    some.admit([request])
    computed(request, [7] if spoiled else [])
    request.bad_logits = spoiled
    request.move("finished")
    some.release(request)
    [released] = some.take_releases()
    assert (released.cache_prefix, released.drop_prefix) == (False, spoiled)


def test_pages_of_a_release_are_those_that_were_not_found_in_the_cache():
    some, one, other = slots(), waiting("a", 16), waiting("b", 16)
    some.admit([one, other])
    for request in (one, other):
        computed(request, [])
    other.cache_hit = 8
    some.release(one)
    some.release(other)
    assert some.released_pages == 4 + 2
    some.take_releases()
    assert some.released_pages == 0


def test_stop_tokens_are_suppressed_where_some_tokens_come_first():
    some = slots()
    [admit] = some.admit([waiting(stops=(9, 3), least=2)])
    assert admit.suppressed_ids == (3, 9)
    [admit] = some.admit([waiting("b", stops=(9, 3))])
    assert admit.suppressed_ids == ()


def test_all_who_held_slots_are_lost_with_the_epoch_in_the_order_of_their_admission():
    some, requests = slots(), [waiting(name) for name in "abc"]
    some.admit(requests)
    some.release(requests[0])
    assert some.on_epoch_lost() == requests[1:]
    assert {request.phase for request in requests[1:]} == {"lost"}
    some.begin(3, PageCredits(SIZE, PAGES))
    assert (some.free, some.take_releases(), some.released_pages) == (3, (), 0)


def test_pages_that_the_cache_has_lost_never_become_fewer_within_an_epoch():
    some = slots()
    for number, evicted, expected in ((1, 7, 7), (0, 3, 7), (2, 9, 9)):
        some.on_page_counts(admitted(number, evicted))
        assert some.evicted == expected
    assert (some.on_epoch_lost(), some.evicted) == ([], 0)
    some.begin(3, PageCredits(SIZE, PAGES))
    some.on_page_counts(admitted(0, 1))
    assert some.evicted == 1, "another epoch, whose plans begin at 0 again"


def admitted(number: int, evicted: int) -> Admitted:
    return Admitted(
        epoch=1, number=number, slots=b"", cached=b"", free=5, evictable=0, evicted=evicted
    )

"""What a tokenizer remembers: attempts, groups, and who may have something of a request."""

from __future__ import annotations

from pipeinfer.messages import Work
from pipeinfer.params import RequestParams
from pipeinfer.tokenizer.requests import RoutedRequest, RoutedRequests
from pipeinfer.wire import pack

GROUPS = (0, 1, 2)


def work(name: str, attempt: int = 1, gateway: int = 0) -> Work:
    return Work(name, attempt, gateway, 0, pack([1]), RequestParams(), 0)


def ledger(*entries: RoutedRequest) -> RoutedRequests:
    made = RoutedRequests(GROUPS)
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
    assert list(known.of_group(2)) == [work("b", 5)] and known.remove("b") == GROUPS
    assert known.mark_leaving(1) == [work("c")] and known.remove("c") == GROUPS
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

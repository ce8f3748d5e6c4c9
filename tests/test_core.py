"""A roll call believes whole answers only; a table of what is recent forgets by age and by size."""

from __future__ import annotations

import pytest

from pipeinfer.core import (
    ASK_AGAIN,
    SLICES,
    RecentTable,
    RollCall,
    Send,
    bracketed_answer,
    stage_number,
)
from pipeinfer.messages import Done, Recover, Recovered

ME, INCARNATION = "scheduler-0", 40
QUESTION = Recover(ME, INCARNATION)
OPENING, END = (
    [Recovered(peer, INCARNATION, opening=opening) for peer in ("a", "b")]
    for opening in (True, False)
)


def asked(*peers: str) -> list[Send]:
    return [Send("recovery", peer, QUESTION) for peer in peers]


def test_who_has_not_answered_is_asked_again_after_a_while():
    calls = RollCall(ME, INCARNATION, ["a", "b"])
    assert calls.ask(5.0) == asked("a", "b")
    assert calls.ask(5.0 + ASK_AGAIN / 2) == []
    assert not calls.on_recovered(OPENING[0]) and not calls.on_recovered(END[0])
    assert calls.missing == ["b"] and not calls.complete
    assert calls.ask(5.0 + ASK_AGAIN) == asked("b")
    assert calls.ask(5.0 + 1.5 * ASK_AGAIN) == []
    assert not calls.on_recovered(OPENING[1])
    assert calls.ask(5.0 + 2 * ASK_AGAIN) == asked("b"), "it has not told all"
    assert calls.on_recovered(END[1])
    assert calls.complete and calls.missing == []
    assert calls.ask(100.0) == []


def test_an_answer_counts_once_and_whole_and_to_this_question():
    calls = RollCall(ME, INCARNATION, ["a"])
    assert not calls.on_recovered(END[0]), "what came before it was lost"
    assert not calls.on_recovered(Recovered("a", INCARNATION - 1, opening=True))
    assert not calls.on_recovered(END[0])
    assert not calls.on_recovered(OPENING[1]) and not calls.on_recovered(END[1]), "nobody asked it"
    assert not calls.on_recovered(OPENING[0])
    assert not calls.on_recovered(Recovered("a", INCARNATION - 1))
    assert not calls.complete
    assert calls.on_recovered(END[0])
    assert not calls.on_recovered(OPENING[0]) and not calls.on_recovered(END[0])
    assert calls.complete


def test_an_answer_has_begun_with_its_opening_and_not_before():
    calls = RollCall(ME, INCARNATION, ["a", "b"])
    calls.on_recovered(Recovered("a", INCARNATION - 1, opening=True))
    assert not calls.has_begun("a") and calls.has_begun("who is not asked")
    calls.on_recovered(OPENING[0])
    assert calls.has_begun("a") and not calls.has_begun("b")
    calls.on_recovered(END[0])
    assert calls.has_begun("a")


def test_without_peers_all_is_known():
    calls = RollCall(ME, INCARNATION, [])
    assert calls.complete and calls.ask(0.0) == []


def test_an_answer_stands_between_brackets():
    known = Send("recovery", ME, Done(("r",)))
    first, told, last = bracketed_answer("a", QUESTION, [known])
    assert (first, last) == tuple(Send("recovery", ME, bracket[0]) for bracket in (OPENING, END))
    assert told is known


@pytest.mark.parametrize(
    ("stage", "found"),
    [
        ("scheduler-2", 2),
        ("scheduler-0", 0),
        ("scheduler-123456789", 123456789),
        ("scheduler-1234567890", None),
        ("scheduler-", None),
        ("scheduler", None),
        ("scheduler--1", None),
        ("scheduler-1-0", None),
        ("scheduler-²", None),
        ("gateway-2", None),
    ],
)
def test_the_number_in_a_stages_name(stage, found):
    assert stage_number(stage, "scheduler") == found


SECONDS, MOST = 60.0, 800


def names(recent: RecentTable[int]) -> list[str]:
    return [name for name, _ in recent.items()]


def test_what_came_within_the_time_is_there_and_the_rest_goes_soon_after():
    recent = RecentTable[int](SECONDS, MOST)
    for second in range(1000):
        recent.put(f"at {second}", second, float(second))
        for age in range(min(second + 1, int(SECONDS))):
            assert recent.get(f"at {second - age}") == second - age
        assert len(recent) <= SECONDS * (1 + 1 / SLICES) + 2
    assert "at 100" not in recent and recent.get("at 100") is None


def test_of_many_the_latest_are_there_and_never_more():
    recent = RecentTable[int](SECONDS, MOST)
    for number in range(5 * MOST):
        recent.put(str(number), number, number * 1e-3)
        assert len(recent) <= MOST
        least = min(number + 1, MOST - MOST // SLICES)
        assert names(recent)[-least:] == [str(n) for n in range(number + 1 - least, number + 1)]


def test_few_and_then_many_are_never_more_either():
    recent = RecentTable[int](SECONDS, MOST)
    for number in range(3 * MOST):
        recent.put(str(number), number, number * 8.0 if number < SLICES else 59.0 + number * 1e-3)
        assert len(recent) <= MOST
    assert len(recent) >= MOST - MOST // SLICES


def test_what_is_put_again_is_there_once_as_the_latest():
    recent = RecentTable[int](SECONDS, MOST)
    recent.put("a", 1, 0.0)
    recent.put("b", 2, 10.0)
    recent.put("a", 3, 50.0)
    assert list(recent.items()) == [("b", 2), ("a", 3)] and len(recent) == 2
    recent.put("c", 4, 100.0)
    assert list(recent.items()) == [("a", 3), ("c", 4)], "b is 90 seconds old"


def test_after_a_pause_nothing_old_is_left():
    recent = RecentTable[int](SECONDS, MOST)
    for number in range(MOST):
        recent.put(str(number), number, 1.0)
    recent.put("later", 0, 1.0 + SECONDS)
    assert names(recent) == ["later"]

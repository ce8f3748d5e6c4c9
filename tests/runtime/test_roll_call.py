"""A roll call asks everybody until each has told all, and believes whole answers only."""

from __future__ import annotations

import pytest

from pipeinfer.core import Send
from pipeinfer.messages import Done, Recover, Recovered
from pipeinfer.recovery import ASK_AGAIN, RollCall, bracketed_answer, stage_number

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

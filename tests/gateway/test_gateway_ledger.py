"""The records of requests: what of a row is new, how ends are repeated, and how many may wait."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from pipeinfer.gateway.ledger import (
    ENDED_LIFETIME,
    MAX_ENDED,
    Backlog,
    Call,
    EndedRequest,
    EndedRequests,
    OutputDiverged,
    RequestRecord,
    StreamGap,
    call_tokens,
    resubmissions,
)
from pipeinfer.messages import Abort, Done, Submit, TextRow
from pipeinfer.params import RequestParams
from pipeinfer.wire import pack


def record(timeout: float = 0.0) -> RequestRecord:
    submit = Submit("r", 1, 0, RequestParams(), 7, "x", timeout=timeout)
    return RequestRecord(submit, "tokenizer-0", 100.0, 3)


def row(text: str, byte: int, token: int, ids: int) -> TextRow:
    return TextRow("r", 1, text, byte, token, pack(range(token, token + ids)))


def test_a_new_record_has_delivered_nothing_and_has_no_group():
    new = record()
    assert new.prompt_tokens == -1 and not new.has_output and new.early == []
    assert (new.bytes, new.tokens, new.group, new.prompt_tokens) == (0, 0, -1, -1)
    assert list(resubmissions([new])) == [new.submit] and new.submit.group == -1
    new.group = 2
    assert [submit.group for submit in resubmissions([new])] == [2]


def test_choices_that_live_are_told_again_together_where_they_run():
    submit = Submit("r", 1, 0, RequestParams(), 7, "x", choices=(0, 1, 2, 3, 4))
    live = [RequestRecord(submit, "tokenizer-0", 0.0, 3, number) for number in (1, 2, 4)]
    assert [one.request_id for one in live] == ["r/1", "r/2", "r/4"]
    assert list(resubmissions(live)) == [structs.replace(submit, choices=(1, 2, 4))]
    live[1].group = 1
    told = list(resubmissions(live))
    assert [(one.choices, one.group) for one in told] == [((1, 4), -1), ((2,), 1)]


def test_a_prompt_counts_with_its_first_choice_alone():
    submit = Submit("r", 1, 0, RequestParams(), 7, "x", choices=(0, 1))
    both = [RequestRecord(submit, "tokenizer-0", 0.0, 3, number) for number in (0, 1)]
    assert [one.once(9) for one in both] == [9, 0]


def test_deadlines_count_from_when_a_request_came():
    assert record(2.0).deadline == 102.0
    assert record().deadline == float("inf")


def test_only_what_was_not_delivered_is_new():
    new = record()
    assert new.advance(row("aé", 0, 0, 2)) == ("aé", pack([0, 1]))
    assert (new.bytes, new.tokens) == (3, 2)
    assert new.advance(row("aéb", 0, 0, 3)) == ("b", pack([2]))
    assert new.advance(row("é", 1, 1, 1)) == ("", b"")
    assert new.advance(row("c", 4, 3, 1)) == ("c", pack([3]))
    assert (new.bytes, new.tokens) == (5, 4)


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (row("x", 4, 2, 1), "continues at byte 4, but 3 were"),
        (row("x", 3, 3, 1), "continue at 3, but 2 were"),
        (row("aaé", 0, 0, 2), "byte 3, .* inside a character"),
    ],
)
def test_what_does_not_continue_is_a_hole_and_nothing_of_it_is_delivered(again, message):
    new = record()
    new.advance(row("aé", 0, 0, 2))
    with pytest.raises(StreamGap, match=message):
        new.advance(again)
    assert (new.bytes, new.tokens) == (3, 2)


def test_ids_that_are_repeated_must_be_those_that_were_delivered():
    new = record()
    new.advance(TextRow("r", 1, "abc", 0, 0, pack([5, 6, 7])))
    for offset, ids in ((0, [5, 6, 8, 9]), (1, [7]), (2, [6, 9])):
        with pytest.raises(OutputDiverged):
            new.advance(TextRow("r", 1, "x", offset, offset, pack(ids)))
    assert (new.bytes, new.tokens, bytes(new.ids)) == (3, 3, pack([5, 6, 7]))
    assert new.advance(TextRow("r", 1, "cd", 2, 2, pack([7, 8]))) == ("d", pack([8]))


def test_the_ends_of_the_last_minute_are_said_again():
    endings = EndedRequests()
    endings.add("early", EndedRequest("tokenizer-0", 1, "", 0.0))
    endings.add("done", EndedRequest("tokenizer-0", 1, "", 1.0))
    endings.add("aborted", EndedRequest("tokenizer-0", 2, "timeout", 1.0))
    endings.add("stray", EndedRequest("", 3, "unknown", 1.0))
    endings.add("of another", EndedRequest("tokenizer-1", 1, "", 1.0))
    assert list(endings.recent("tokenizer-0", ENDED_LIFETIME)) == [
        Done(("done",)),
        Abort("aborted", 2, "timeout"),
        Abort("stray", 3, "unknown"),
    ]
    assert list(endings.recent("tokenizer-0", ENDED_LIFETIME + 1)) == []


def test_the_latest_ends_are_remembered_for_a_minute():
    endings = EndedRequests()
    for n in range(MAX_ENDED):
        endings.add(str(n), EndedRequest("tokenizer-0", 1, "", 1.0))
    endings.add("0", again := EndedRequest("tokenizer-0", 1, "told again", 2.0))
    endings.add("more", EndedRequest("tokenizer-0", 1, "", 3.0))
    assert endings.get("0") == again and endings.get("1") is None
    assert endings.get(str(MAX_ENDED - 1)) is not None and endings.get("more") is not None
    endings.add("later", EndedRequest("tokenizer-0", 1, "", 3.0 + ENDED_LIFETIME))
    assert endings.get("0") is None and endings.get("more") is None


PARAMS = RequestParams()
FREE = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda s: st.lists(s, max_size=4) | st.dictionaries(st.text(), s, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(st.text(), FREE, max_size=4)


def call(**fields: Any) -> Call:
    return Call("r", PARAMS, **fields)


def text_bytes(value: Any) -> int:
    """Of all texts in a free-form value, as Python keeps them."""
    if isinstance(value, str):
        return sys.getsizeof(value) - sys.getsizeof("")
    if isinstance(value, dict):
        return sum(map(text_bytes, (*value.keys(), *value.values())))
    return sum(map(text_bytes, value)) if isinstance(value, list) else 0


def test_ids_count_each_and_english_text_a_quarter_of_its_letters() -> None:
    assert call_tokens(call(prompt_ids=pack(range(1000)))) == 1000
    assert 1000 <= call_tokens(call(text="lorem ip" * 500)) <= 1100
    assert call_tokens(call(text="é" * 4000)) >= 4000, "a letter may be a token then"


@given(st.lists(OBJECT, max_size=4), OBJECT)
@example([], {"¡": {"\x80": "", "¡": "\x80", "¢": "\x80"}})  # many texts of a letter each
def test_the_size_of_a_chat_is_at_least_a_quarter_of_what_its_texts_occupy(
    chat: list[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    size = call_tokens(call(chat=chat, template_arguments=arguments))
    assert 4 * size >= text_bytes(chat) + text_bytes(arguments)


def test_values_without_text_count_as_well() -> None:
    assert call_tokens(call(chat=[], template_arguments={"a": [0] * 100_000})) > 1_000_000
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert call_tokens(call(chat=[{"role": "user", "content": nested}])) > 1_000_000


@given(
    st.integers(1, 5),
    st.integers(0, 100),
    st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=40),
)
def test_what_waits_never_exceeds_its_bounds(
    most_requests: int, most_tokens: int, steps: list[tuple[bool, int]]
) -> None:
    backlog = Backlog(most_requests, most_tokens)
    waiting: list[int] = []
    for comes, tokens in steps:
        if comes:
            reason = backlog.refusal_reason(1, tokens)
            fits = sum(waiting) + tokens <= most_tokens or not most_tokens or not waiting
            room = sum(waiting) < most_tokens or not most_tokens or not waiting
            assert (not reason) == (len(waiting) < most_requests and fits and room)
            if not reason:
                waiting.append(tokens)
                backlog.add(tokens)
        elif waiting:
            backlog.remove(waiting.pop(tokens % len(waiting)))
        assert (backlog.requests, backlog.tokens) == (len(waiting), sum(waiting))
        assert len(waiting) <= most_requests
        assert not most_tokens or len(waiting) <= 1 or sum(waiting) <= most_tokens


@pytest.mark.parametrize(("waiting", "more", "room"), [(0, 4, True), (1, 3, True), (1, 4, False)])
def test_each_prompt_of_a_request_needs_room(waiting: int, more: int, room: bool) -> None:
    backlog = Backlog(4, 0)
    for _ in range(waiting):
        backlog.add(1)
    assert (not backlog.refusal_reason(more, 0)) == room


def test_a_request_counts_with_what_its_log_probs_will_occupy() -> None:
    ids = pack(range(100))

    def counted(**asked: Any) -> int:
        return call_tokens(Call("r", RequestParams(max_tokens=50, **asked), prompt_ids=ids))

    assert counted() == 100
    assert counted(prompt_logprobs=0) == 100 + 100 * 2
    assert counted(prompt_logprobs=20) == 100 + 100 * 42
    assert counted(logprobs=5) == 100 + 50 * 12
    endless = RequestParams(max_tokens=2**31 - 1, logprobs=0)
    assert call_tokens(Call("r", endless, prompt_ids=ids)) == 100 + 4096 * 2

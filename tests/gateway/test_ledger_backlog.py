"""What waits is counted so that a bound of tokens is a bound of memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeinfer.gateway.ledger import Backlog, Call, call_tokens
from pipeinfer.params import SamplingParams
from pipeinfer.wire import pack

PARAMS = SamplingParams()
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
        return call_tokens(Call("r", SamplingParams(max_tokens=50, **asked), prompt_ids=ids))

    assert counted() == 100
    assert counted(prompt_logprobs=0) == 100 + 100 * 2
    assert counted(prompt_logprobs=20) == 100 + 100 * 42
    assert counted(logprobs=5) == 100 + 50 * 12
    endless = SamplingParams(max_tokens=2**31 - 1, logprobs=0)
    assert call_tokens(Call("r", endless, prompt_ids=ids)) == 100 + 4096 * 2

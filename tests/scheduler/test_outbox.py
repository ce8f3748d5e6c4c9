"""What the detokenizers are told: openings, rows of new tokens, and all of it again."""

from __future__ import annotations

import msgspec
import pytest

from pipeinfer.messages import (
    Abort,
    OpenStream,
    PromptTokens,
    Refused,
    TokenizedRequest,
    TokenRow,
    Tokens,
)
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.recovery import (
    CONTEXT_TOKENS,
    Outbox,
    all_rows,
    last_row,
    next_row,
    refusal,
)
from pipeinfer.scheduler.request import Request, request_of
from pipeinfer.wire import LOGPROBS_PER_MESSAGE, logprob_bytes, pack, unpack

GROUP = 3


def request(name: str = "r", to: int = 0, tokens: int = 4, **params: object) -> Request:
    made = RequestParams(max_tokens=9_999, **params)  # type: ignore[arg-type]
    return request_of(TokenizedRequest(name, 2, 7, to, pack(range(tokens)), made, 0), 1, 0.0)


def with_outputs(many: int, **params: object) -> Request:
    made = request(**params)
    made.outputs.extend(range(100, 100 + many))
    width = made.logprob_size
    made.logprobs = bytearray(
        b"".join(n.to_bytes(width, "little") for n in range(many * (width > 0)))
    )
    return made


def test_rows_of_one_event_come_behind_all_else_in_one_message_for_each_detokenizer():
    outbox, rows = Outbox(GROUP), [TokenRow(name, 0, b"") for name in "abc"]
    outbox.row(request("a", to=0), rows[0])
    outbox.row(request("b", to=1), rows[1])
    outbox.send("tokens", "detokenizer-0", Abort("x", 1))
    outbox.row(request("c", to=0), rows[2])
    first, *behind = outbox.take()
    assert first.message == Abort("x", 1)
    assert [(send.to, send.message) for send in behind] == [
        ("detokenizer-0", Tokens((rows[0], rows[2]), GROUP)),
        ("detokenizer-1", Tokens((rows[1],), GROUP)),
    ]
    assert outbox.take() == [], "each once"


def test_an_opening_has_the_end_of_the_prompt_and_whose_request_it_is():
    long = request(tokens=3 * CONTEXT_TOKENS)
    opened = Outbox(GROUP).open_message(long).message
    assert isinstance(opened, OpenStream)
    assert unpack(opened.context_ids).tolist() == list(
        range(2 * CONTEXT_TOKENS, 3 * CONTEXT_TOKENS)
    )
    assert (opened.attempt, opened.gateway, opened.group) == (2, 7, GROUP)


@pytest.mark.parametrize("many", [0, 1, 40])
def test_a_detokenizer_that_knows_nothing_is_told_all_there_is(many: int):
    made = with_outputs(many)
    opened, *rows = [send.message for send in Outbox(GROUP).all_of(made)]
    assert isinstance(opened, OpenStream)
    wanted = [Tokens((TokenRow("r", 0, pack(made.outputs)),), GROUP)] * bool(many)
    assert rows == wanted, "nothing of a request that has no output"
    *_, last = [send.message for send in Outbox(GROUP).all_of(made, last_row(made, "length"))]
    assert isinstance(last, Tokens)
    assert (last.rows[0].ids, last.rows[0].finish) == (pack(made.outputs), "length")


def test_of_a_request_that_was_refused_the_refusal_is_all():
    refused = refusal(request(), 400, "too long", "prompt")
    assert refused == Refused("r", 2, 7, 400, "too long", "prompt")
    assert [send.message for send in Outbox(GROUP).all_of(request(), refused)] == [refused]


def test_what_has_log_probs_comes_in_rows_of_a_bounded_size_each_with_its_own():
    many = 2 * LOGPROBS_PER_MESSAGE + 3
    made = with_outputs(many, logprobs=0)
    rows = list(all_rows(made, last_row(made, "length")))
    assert [len(row.ids) // 4 for row in rows] == [LOGPROBS_PER_MESSAGE, LOGPROBS_PER_MESSAGE, 3]
    assert [row.offset for row in rows] == [0, LOGPROBS_PER_MESSAGE, 2 * LOGPROBS_PER_MESSAGE]
    assert [row.finish for row in rows] == [None, None, "length"]
    assert b"".join(row.ids for row in rows) == pack(made.outputs)
    assert b"".join(row.logprobs for row in rows) == made.logprobs


def test_log_probs_of_a_prompt_come_from_where_they_are_wanted_on():
    many, width = 2 * LOGPROBS_PER_MESSAGE, logprob_bytes(1)
    made = request(tokens=many, prompt_logprobs=1)
    made.prompt_logprobs = bytearray(b"".join(n.to_bytes(width, "little") for n in range(many)))
    told = [send.message for send in Outbox(GROUP).prompt_logprobs(made, 5)]
    assert all(isinstance(one, PromptTokens) for one in told)
    assert [one.first for one in told] == [5, 5 + LOGPROBS_PER_MESSAGE]
    assert b"".join(one.ids for one in told) == pack(range(5, many))
    assert b"".join(one.logprobs for one in told) == made.prompt_logprobs[5 * width :]


def test_the_next_row_has_what_came_since_with_its_log_probs_and_what_was_cached_before():
    made = with_outputs(5, logprobs=0)
    row = next_row(made, 3, None, None)
    assert (row.offset, row.ids, row.cached_tokens) == (3, pack([103, 104]), 0)
    assert row.logprobs == made.logprobs[3 * made.logprob_size :]
    made.first_cache_hit = 8
    assert next_row(made, 5, "stop", 9) == TokenRow("r", 5, b"", "stop", 9, "", 8)


def test_an_end_that_only_a_lost_detokenizer_knew_is_an_error_unless_the_ids_show_it():
    made = with_outputs(2)
    assert last_row(made, "stop").stop_token == 101
    assert last_row(made, "length").stop_token is None
    unknown = last_row(made, None)
    assert unknown.finish == "error" and "that ended this request was lost" in unknown.error
    assert msgspec.structs.replace(unknown, finish=None, error="") == TokenRow("r", 2, b"")

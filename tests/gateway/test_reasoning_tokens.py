"""Tokens of thoughts are counted exactly: the same whole and streamed, however an answer's tokens
arrive, whatever says them again, and wherever the prompt leaves the thoughts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from gateway_pipeline import Gateway, StartGateway
from test_harmony_http import CUTS, TEXTS, events, post
from test_spoken_outputs import ANSWERS, ENCLOSED, PARSERS, Answer, cuts, spelled

from pipeinfer.gateway.ledger import RequestRecord, offsets
from pipeinfer.gateway.tool_parsers.base import ParserFactory
from pipeinfer.gateway.tool_parsers.registry import OutputParsers
from pipeinfer.messages import Submit, TextRow
from pipeinfer.params import ReasoningState, RequestParams
from pipeinfer.text import REASONING_PARSERS, ReasoningTags
from pipeinfer.wire import pack, unpack
from template_families import HERE

TEMPLATE = "{{ tools }}<tool_call>{% if name and arguments %}{% endif %}</tool_call><think>"
TEXT = "<think> hm hm 你 </think> I look."  # of tokens that are words with a space behind
OPEN = "hm hm 你 </think> I look."


def begins(tokens: Sequence[str]) -> list[int]:
    return [0, *itertools.accumulate(map(len, tokens))][: len(tokens)]


def spans(answer: Answer, tags: ReasoningTags) -> list[tuple[int, float]]:
    """Where in its text the thoughts of an answer lie, by the signs for the tags."""
    text, signs = spelled(answer.text, tags), answer.text
    opens = signs.lstrip().startswith("(")
    if answer.left == "over" or (answer.left == "before" and not opens):
        return []
    first = signs.index("(") + len(tags.opening) if opens else 0
    closed = text.find(tags.closing, first)
    return [(first, closed if closed >= 0 else float("inf"))]


def counted(
    make: ParserFactory, left: ReasoningState, tokens: Sequence[str], deltas: Sequence[slice]
) -> int:
    """By a reader that gets these tokens in so many deltas."""
    reader, places = make(left), begins(tokens)
    for delta in deltas:
        reader.reasoning.add_offsets(pack(places[delta]))
        reader.feed("".join(tokens[delta]))
    reader.finish()
    return reader.reasoning.count


def batches(tokens: Sequence[str]) -> Iterator[list[slice]]:
    """One after the other, all at once, and by three."""
    many = len(tokens)
    for size in (1, many or 1, 3):
        yield [slice(at, at + size) for at in range(0, many, size)]


@pytest.mark.parametrize("parser", PARSERS)
def test_a_token_is_a_thought_that_begins_between_the_tags(parser: str) -> None:
    make = OutputParsers("hermes", parser, True).parser_factory({"now": {}})
    tags, found = REASONING_PARSERS[parser], set[int]()
    assert make is not None
    for answer in (*ANSWERS, *(ENCLOSED if tags.answer[0] else ())):
        where = spans(answer, tags)
        for tokens in cuts(spelled(answer.text, tags), tags):
            meant = sum(any(a <= at < b for a, b in where) for at in begins(tokens))
            for deltas in batches(tokens):
                assert counted(make, answer.left, tokens, deltas) == meant, (answer, tokens)
            found.add(meant)
    assert len(found) > 5


@pytest.mark.parametrize("hidden", [False, True])
def test_a_token_is_a_thought_that_begins_in_a_message_of_analysis(hidden: bool) -> None:
    reading = OutputParsers("openai", "openai_gptoss", True)
    make = reading.parser_factory({"weather": {}, "now": {}}, include_reasoning=not hidden)
    assert make is not None
    for text, blocks in TEXTS:
        where, at = list[tuple[int, int]](), 0
        for what in (what for kind, what in blocks if kind == "reasoning"):
            first = text.index(f"<|message|>{what}", at) + len("<|message|>")
            at = first + len(what)
            where.append((first, at))
        for cut in CUTS:
            tokens = cut(text)
            meant = sum(any(a <= at < b for a, b in where) for at in begins(tokens))
            for deltas in batches(tokens):
                assert counted(make, "before", tokens, deltas) == meant, (text, tokens)


def test_a_message_whose_marker_was_forgotten_is_counted_from_its_text() -> None:
    make = OutputParsers("openai", "openai_gptoss").parser_factory(None)
    assert make is not None
    tokens = ["<|channel|>", "analysis", " hm", " hm", "<|end|>", "<|start|>", "assistant",
              "<|channel|>", "final", "<|message|>", "Fine."]  # fmt: skip
    for deltas in batches(tokens):
        assert (
            counted(make, "before", tokens, deltas) == 1
        )  # " hm" begins before the text, with a space


def test_without_tags_nothing_is_a_thought() -> None:
    make = OutputParsers("hermes", "", True).parser_factory({"now": {}})
    assert make is not None
    assert counted(make, "open", ["<think>", "hm", "</think>"], [slice(0, 3)]) == 0


def test_what_is_said_again_is_counted_once() -> None:
    """A detokenizer that was started again cuts rows otherwise."""
    submit = Submit("r", 1, 0, RequestParams(), 0, text="x", token_offsets=True)
    record = RequestRecord(submit, "tokenizer-0", 0.0, 1)
    first = TextRow("r", 1, "ab", 0, 0, pack([1, 2]), offsets=pack([0, 1]))
    record.advance(first)
    again = TextRow("r", 1, "abcd", 0, 0, pack([1, 2, 3, 4]), offsets=pack([0, 1, 2, 3]))
    text, ids = record.advance(again)
    assert (text, unpack(offsets(again, ids)).tolist()) == ("cd", [2, 3])
    assert offsets(TextRow("r", 1, "e", 4, 4, pack([5])), pack([5])) == b""


@pytest.fixture
async def thinking(start_gateway: StartGateway, tmp_path: Path) -> Gateway:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return await start_gateway(chat_template=str(path))


async def usages(gateway: Gateway, **body: Any) -> list[Any]:
    """Of a chat: whole, streamed, and as a stream says so far."""
    url, made = "/v1/chat/completions", list[Any]()
    made.append(json.loads(await post(gateway, url, body))["usage"])
    for options in (
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ):
        told = events(await post(gateway, url, {**body, "stream": True, "stream_options": options}))
        made.append(told[-1]["usage"])
        so_far = [event["usage"] for event in told if event["choices"]]
        counts = [usage["reasoning_tokens"] for usage in so_far if usage]
        assert counts == sorted(counts) and counts[-1:] in ([], [made[0]["reasoning_tokens"]])
    return made


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("text", "left", "many"),
    [(TEXT, "before", 3), (OPEN, "open", 3), (TEXT, "over", 0), ("I look.", "before", 0)],
)
async def test_usage_says_how_many_tokens_were_thoughts(
    thinking: Gateway, text: str, left: ReasoningState, many: int, n: int
) -> None:
    thinking.pipeline.left = left
    asked: Any = {"messages": [{"role": "user", "content": text}], "n": n}
    for more in ({}, {"include_reasoning": False}, {"logprobs": True}, {"return_token_ids": True}):
        for usage in await usages(thinking, **asked, **more):
            assert usage["reasoning_tokens"] == many * n
            assert usage["completion_tokens_details"] == {"reasoning_tokens": many * n}


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_and_messages_count_as_chats_do(thinking: Gateway, stream: bool) -> None:
    made = await post(thinking, "/v1/responses", {"input": TEXT, "stream": stream})
    told = events(made)[-1]["response"] if stream else json.loads(made)
    assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    body = {"max_tokens": 20, "messages": [{"role": "user", "content": TEXT}], "stream": stream}
    made = await post(thinking, "/v1/messages", body)
    told = events(made)[-2] if stream else json.loads(made)
    assert told["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


async def test_the_official_client_reads_the_count(thinking: Gateway) -> None:
    asked: Any = {"model": "test", "messages": [{"role": "user", "content": TEXT}]}
    made = await thinking.client().chat.completions.create(**asked)
    assert made.usage is not None and made.usage.completion_tokens_details is not None
    assert made.usage.completion_tokens_details.reasoning_tokens == 3


async def test_only_answers_that_may_think_ask_where_tokens_begin(
    thinking: Gateway, start_gateway: StartGateway
) -> None:
    plain = await start_gateway(reasoning_parser="none", tool_parser="none")
    for gateway, asked in ((thinking, True), (plain, False)):
        await post(
            gateway, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}
        )
        assert gateway.pipeline.submits[-1].token_offsets is asked
    await post(thinking, "/v1/completions", {"prompt": "x"})
    assert thinking.pipeline.submits[-1].token_offsets is False


async def test_harmony_counts_over_http(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(chat_template=str(HERE / "published" / "gpt-oss.jinja"))
    gateway.pipeline.cut = lambda submit: list(str((submit.chat or [])[-1]["content"]))
    text, blocks = TEXTS[11]
    many = sum(len(what) for kind, what in blocks if kind == "reasoning")
    for usage in await usages(gateway, messages=[{"role": "user", "content": text}]):
        assert usage["reasoning_tokens"] == many > 0

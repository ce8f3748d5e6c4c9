"""What the dialects share: they turn foreign bodies into chats, and pieces into foreign answers.

A dialect knows its bodies and events; calls, readers and connections are those of chats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
from msgspec.structs import replace

from pipeinfer.gateway.dialects.blocks import BlockEvent, OutputBlocks
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.events import Delta, Started
from pipeinfer.gateway.logprob_shapes import chat_token_logprob
from pipeinfer.gateway.pieces import OutputParser, PlainTextParser
from pipeinfer.gateway.reasoning_tokens import ReasoningTokenCounter
from pipeinfer.gateway.requests import ParsedRequest, RequestDefaults, parse_chat
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.gateway.shapes import ResponseMetadata, TokenUsage
from pipeinfer.gateway.token_scores import token_scores
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.messages import FinishReason

CUT_OFF_REASONS = ("length", "abort")  # how an answer ends that might have gone on

_json = msgspec.json.Encoder()


class ResponseEnd:
    """How an answer ended, and what it took. `finish`: None until it has."""

    def __init__(self) -> None:
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage = TokenUsage()

    def set_from(self, delta: Delta, reasoning: int) -> None:
        """From the last delta, and the count of tokens that are thoughts."""
        self.finish, self.stop_reason = delta.finish, delta.stop_reason
        self.usage.add(delta, reasoning)


class ResponseFormatter(Protocol):
    """One answer in a dialect, as the objects that it shows."""

    def start_events(self, prompt_tokens: int) -> Iterator[JsonObject]:
        """Events before the first block. Each has its name as `type`."""
        ...

    def block_events(self, step: BlockEvent, scores: list[JsonValue]) -> Iterator[JsonObject]:
        """Events of what happens to a block. `scores`: log-probs of tokens that came with it."""
        ...

    def end_events(self, blocks: OutputBlocks, end: ResponseEnd) -> Iterator[JsonObject]:
        """Events of the end."""
        ...

    def full_response(self, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        """All of it as one object."""
        ...

    def error_event(self, error: ApiError, blocks: OutputBlocks, end: ResponseEnd) -> JsonObject:
        """The event of an error amid the answer."""
        ...


class AdapterEncoder:
    """An outlet of one choice whose pieces a dialect shows, by events if it `streams`."""

    def __init__(
        self, answer: ResponseMetadata, formatter: ResponseFormatter, streams: bool
    ) -> None:
        self._parser_factory = answer.parser_factory
        self._parser: OutputParser = PlainTextParser()
        self._reasoning_counter = ReasoningTokenCounter()
        self._formatter = formatter
        self._streams = streams
        self._blocks = OutputBlocks()
        self._end = ResponseEnd()
        self._prompt_tokens = 0
        self._started = False
        self._pending_logprobs: list[JsonValue] = []  # of tokens whose text is still to come

    @property
    def ended(self) -> bool:
        return self._end.finish is not None

    def started(self, index: int, started: Started) -> None:
        self._prompt_tokens = started.prompt_tokens
        if self._parser_factory is not None:
            parser = self._parser_factory(started.thoughts)
            self._parser, self._reasoning_counter = parser, parser.reasoning

    def delta(self, index: int, delta: Delta) -> bytes:
        if not delta.text and not delta.ids and delta.finish is None:
            return b""
        if self._streams:
            return b"".join(map(server_sent_event, self._events(delta)))
        for _ in self._events(delta):
            continue  # the blocks keep what matters
        return (
            _json.encode(self._formatter.full_response(self._blocks, self._end))
            if self.ended
            else b""
        )

    def error(self, error: ApiError) -> bytes:
        return server_sent_event(self._formatter.error_event(error, self._blocks, self._end))

    def _events(self, delta: Delta) -> Iterator[JsonObject]:
        formatter, blocks = self._formatter, self._blocks
        if not self._started:
            self._started = True
            yield from formatter.start_events(self._prompt_tokens)
        if delta.logprobs is not None:
            self._pending_logprobs += map(
                chat_token_logprob, token_scores([(delta.logprobs, delta.ids)])
            )
        self._reasoning_counter.add_offsets(delta.offsets)
        parsed = [*self._parser.feed(delta.text)]
        if delta.finish is not None:
            parsed += self._parser.finish()
        yield from self._formatted(blocks.add(parsed))
        if delta.finish is None:
            return
        self._end.set_from(delta, self._reasoning_counter.count)
        if not blocks.all:
            yield from self._formatted(blocks.add_empty())
        yield from self._formatted(blocks.close(cut=delta.finish in CUT_OFF_REASONS))
        yield from formatter.end_events(blocks, self._end)

    def _formatted(self, steps: Iterable[BlockEvent]) -> Iterator[JsonObject]:
        for step in steps:
            scores: list[JsonValue] = []
            if step.action == "more":
                scores, self._pending_logprobs = self._pending_logprobs, []
                if step.block.kind == "content":
                    step.block.logprobs += scores
            yield from self._formatter.block_events(step, scores)


def server_sent_event(content: JsonObject) -> bytes:
    """One server-sent event, named by the type of what it says."""
    return b"event: %s\ndata: %s\n\n" % (str(content["type"]).encode(), _json.encode(content))


def parse_adapted_chat(
    request: ChatRequest, base: str, terms: RequestDefaults, trace: str, names: Mapping[str, str]
) -> ParsedRequest:
    """chat_job, whose errors name the fields as the dialect calls them: `names` by chat's."""
    try:
        job = parse_chat(request, base, terms, trace)
        return replace(job, constraint=job.constraint.with_field_names(names))
    except ApiError as error:
        raise renamed(error, names) from None

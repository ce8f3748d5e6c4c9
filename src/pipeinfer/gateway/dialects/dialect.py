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
        self._make_reader = answer.parser_factory
        self._reader: OutputParser = PlainTextParser()
        self._reasoning = ReasoningTokenCounter()
        self._speech = formatter
        self._streams = streams
        self._blocks = OutputBlocks()
        self._end = ResponseEnd()
        self._prompt_tokens = 0
        self._begun = False
        self._scores: list[JsonValue] = []  # of tokens whose text is still to come

    @property
    def ended(self) -> bool:
        return self._end.finish is not None

    def started(self, index: int, started: Started) -> None:
        self._prompt_tokens = started.prompt_tokens
        if self._make_reader is not None:
            reader = self._make_reader(started.thoughts)
            self._reader, self._reasoning = reader, reader.reasoning

    def delta(self, index: int, delta: Delta) -> bytes:
        if not delta.text and not delta.ids and delta.finish is None:
            return b""
        if self._streams:
            return b"".join(map(server_sent_event, self._events(delta)))
        for _ in self._events(delta):
            continue  # the blocks keep what matters
        return (
            _json.encode(self._speech.full_response(self._blocks, self._end)) if self.ended else b""
        )

    def error(self, error: ApiError) -> bytes:
        return server_sent_event(self._speech.error_event(error, self._blocks, self._end))

    def _events(self, delta: Delta) -> Iterator[JsonObject]:
        speech, blocks = self._speech, self._blocks
        if not self._begun:
            self._begun = True
            yield from speech.start_events(self._prompt_tokens)
        if delta.logprobs is not None:
            self._scores += map(chat_token_logprob, token_scores([(delta.logprobs, delta.ids)]))
        self._reasoning.add_offsets(delta.offsets)
        pieces = [*self._reader.feed(delta.text)]
        if delta.finish is not None:
            pieces += self._reader.finish()
        yield from self._shown(blocks.add(pieces))
        if delta.finish is None:
            return
        self._end.set_from(delta, self._reasoning.count)
        if not blocks.all:
            yield from self._shown(blocks.add_empty())
        yield from self._shown(blocks.close(cut=delta.finish in CUT_OFF_REASONS))
        yield from speech.end_events(blocks, self._end)

    def _shown(self, steps: Iterable[BlockEvent]) -> Iterator[JsonObject]:
        for step in steps:
            scores: list[JsonValue] = []
            if step.action == "more":
                scores, self._scores = self._scores, []
                if step.block.kind == "content":
                    step.block.logprobs += scores
            yield from self._speech.block_events(step, scores)


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

"""What the dialects share: they turn foreign bodies into chats, and pieces into foreign answers.

A dialect knows its bodies and events; calls, readers and connections are those of chats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
from msgspec.structs import replace

from pipeinfer.gateway.dialects.blocks import Blocks, Step
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.events import Delta, Started, token_scores
from pipeinfer.gateway.logprob_shapes import chat_token
from pipeinfer.gateway.pieces import Plain, Reader
from pipeinfer.gateway.reasoning_tokens import ReasoningTokens
from pipeinfer.gateway.requests import Job, Terms, chat_job
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.gateway.shapes import Answer, Usage
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.messages import FinishReason

CUT = ("length", "abort")  # how an answer ends that might have gone on

_json = msgspec.json.Encoder()


class End:
    """How an answer ended, and what it took. `finish`: None until it has."""

    def __init__(self) -> None:
        self.finish: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage = Usage()

    def fill(self, delta: Delta, reasoning: int) -> None:
        """From the last delta, and the count of tokens that are thoughts."""
        self.finish, self.stop_reason = delta.finish, delta.stop_reason
        self.usage.add(delta, reasoning)


class Speech(Protocol):
    """One answer in a dialect, as the objects that it shows."""

    def begun(self, prompt_tokens: int) -> Iterator[JsonObject]:
        """Events before the first block. Each has its name as `type`."""
        ...

    def step(self, step: Step, scores: list[JsonValue]) -> Iterator[JsonObject]:
        """Events of what happens to a block. `scores`: log-probs of tokens that came with it."""
        ...

    def over(self, blocks: Blocks, end: End) -> Iterator[JsonObject]:
        """Events of the end."""
        ...

    def whole(self, blocks: Blocks, end: End) -> JsonObject:
        """All of it as one object."""
        ...

    def error(self, error: ApiError, blocks: Blocks, end: End) -> JsonObject:
        """The event of an error amid the answer."""
        ...


class SpeechOutlet:
    """An outlet of one choice whose pieces a dialect shows, by events if it `streams`."""

    def __init__(self, answer: Answer, speech: Speech, streams: bool) -> None:
        self._make_reader = answer.reader
        self._reader: Reader = Plain()
        self._reasoning = ReasoningTokens()
        self._speech = speech
        self._streams = streams
        self._blocks = Blocks()
        self._end = End()
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
            return b"".join(map(event, self._events(delta)))
        for _ in self._events(delta):
            continue  # the blocks keep what matters
        return _json.encode(self._speech.whole(self._blocks, self._end)) if self.ended else b""

    def error(self, error: ApiError) -> bytes:
        return event(self._speech.error(error, self._blocks, self._end))

    def _events(self, delta: Delta) -> Iterator[JsonObject]:
        speech, blocks = self._speech, self._blocks
        if not self._begun:
            self._begun = True
            yield from speech.begun(self._prompt_tokens)
        if delta.logprobs is not None:
            self._scores += map(chat_token, token_scores([(delta.logprobs, delta.ids)]))
        self._reasoning.add(delta.offsets)
        pieces = [*self._reader.read(delta.text)]
        if delta.finish is not None:
            pieces += self._reader.end()
        yield from self._shown(blocks.take(pieces))
        if delta.finish is None:
            return
        self._end.fill(delta, self._reasoning.count)
        if not blocks.all:
            yield from self._shown(blocks.empty())
        yield from self._shown(blocks.close(cut=delta.finish in CUT))
        yield from speech.over(blocks, self._end)

    def _shown(self, steps: Iterable[Step]) -> Iterator[JsonObject]:
        for step in steps:
            scores: list[JsonValue] = []
            if step.what == "more":
                scores, self._scores = self._scores, []
                if step.block.kind == "content":
                    step.block.logprobs += scores
            yield from self._speech.step(step, scores)


def event(content: JsonObject) -> bytes:
    """One server-sent event, named by the type of what it says."""
    return b"event: %s\ndata: %s\n\n" % (str(content["type"]).encode(), _json.encode(content))


def dialect_job(
    request: ChatRequest, base: str, terms: Terms, trace: str, names: Mapping[str, str]
) -> Job:
    """chat_job, whose errors name the fields as the dialect calls them: `names` by chat's."""
    try:
        job = chat_job(request, base, terms, trace)
        return replace(job, asked=job.asked.called(names))
    except ApiError as error:
        raise renamed(error, names) from None

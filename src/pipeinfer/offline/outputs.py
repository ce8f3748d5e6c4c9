"""What a caller of the offline classes gets back, and how it is gathered from a request's deltas.

Knows the gateway's local events; no pipeline and no threads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.gateway import events
from pipeinfer.gateway.events import Call, Failed, Started
from pipeinfer.gateway.token_scores import alternatives
from pipeinfer.logprobs import NO_ID, layout
from pipeinfer.messages import FinishReason, LogprobTexts
from pipeinfer.packing import unpack, unpack_few


class RequestError(ValueError):
    """A request that was refused. `param`: what is wrong with it; `code`: OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(slots=True)
class Logprob:
    """Of a token at one position. rank: 1 is the likeliest. decoded_token: the token by itself;
    U+FFFD is what is only a part of a character."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]  # by id: the token itself, then the likeliest others


@dataclass(slots=True)
class Delta:
    """New output of a streamed request; the reader's own. Not frozen: that would cost four times as
    much, for every token.

    offset: output tokens before `token_ids`. finish_reason is set on the last delta only, as are
    stop_reason (the stop string or stop token id, None for the model's own), cached_tokens
    (prompt tokens found in the prefix cache) and `error`, which belongs to finish_reason "error".
    logprobs: of each of token_ids, if asked for. prompt_logprobs: of further tokens of the prompt,
    all of them before the first output token; None in place of those of its first one.
    index: of the choice. cached_tokens are those of the first: a prompt counts once.
    """

    text: str
    token_ids: list[int]
    offset: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    error: str = ""
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    index: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One completion. token_ids: without the stop token, but with those of a stop string.

    stop_reason: the stop string or stop token id, None for the model's own end. `error` says what
    happened if finish_reason is "error". logprobs: of each of token_ids, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[Logprobs] | None = None
    error: str = ""


@dataclass(slots=True)
class RequestMetrics:
    """Seconds of time.monotonic(); first_token_time is None if there was no token."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None

    def add(self, other: RequestMetrics) -> None:
        """Those of another choice: the first token of both, and the last."""
        if other.first_token_time is None or other.last_token_time is None:
            return
        if self.first_token_time is None or other.first_token_time < self.first_token_time:
            self.first_token_time = other.first_token_time
        if self.last_token_time is None or other.last_token_time > self.last_token_time:
            self.last_token_time = other.last_token_time


@dataclass(slots=True)
class RequestOutput:
    """A finished request; outputs: its choices. prompt: None if ids or a chat were given.

    cached_tokens: how many of the prompt's tokens were found in the prefix cache. prompt_logprobs:
    of each of the prompt's tokens, if asked for; None in place of those of the first one.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))
    prompt_logprobs: list[Logprobs | None] | None = None


def logprobs_of(delta: events.Delta) -> list[Logprobs] | None:
    """As callers see them; None if the delta has none."""
    return None if delta.logprobs is None else list(_listed(delta.logprobs, delta.ids))


def prompt_logprobs_of(delta: events.Delta) -> list[Logprobs | None] | None:
    """The same of the prompt's tokens in it."""
    if delta.prompt is None:
        return None
    return [listed or None for listed in _listed(delta.prompt, delta.prompt.ids)]


def _listed(texts: LogprobTexts, raw_ids: bytes) -> Iterator[Logprobs]:
    """Of each token; nothing of one that nothing comes before. Hot path: once for every token, so
    that nothing is made in between."""
    ids = unpack_few(raw_ids)
    most = alternatives(texts, len(ids))
    step, names = 1 + most, texts.texts
    for n, words in enumerate(layout(most).iter_unpack(texts.scores)):
        rank, first = words[1], n * step
        if not rank:
            yield {}
            continue
        own = Logprob(words[0], rank, names[first].decode(errors="replace"))
        listed = {ids[n]: own}
        for place in range(1, step):
            other = words[1 + place]
            if other not in listed and other != NO_ID:
                name = names[first + place].decode(errors="replace")
                listed[other] = Logprob(words[step + place], place, name)
        yield listed


def is_refusal(failed: Failed) -> bool:
    """Whether the request itself is at fault, and not the pipeline or the time."""
    return failed.status < 500 and failed.status != 408


def _end_of(failed: Failed) -> tuple[FinishReason, str]:
    """(finish_reason, error) of a failure that is no refusal."""
    if failed.status == 408 or failed.code == "closed":
        return "abort", ""
    return "error", failed.message


class Collector:
    """Gathers one whole choice. `done(collector)` is called once, at its end."""

    __slots__ = (
        "_call",
        "_done",
        "_ids",
        "_logprobs",
        "_metrics",
        "_prompt_ids",
        "_prompt_logprobs",
        "_text",
        "end",
        "refusal",
    )

    def __init__(self, call: Call, done: Callable[[Collector], None]) -> None:
        self._call = call
        self._done = done
        self._text: list[str] = []
        self._ids: list[bytes] = []
        self._prompt_ids = b""
        params = call.params
        self._logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[Logprobs | None] | None = (
            None if params.prompt_logprobs is None else []
        )
        self._metrics = RequestMetrics(time.monotonic())
        self.refusal: RequestError | None = None
        self.end: dict[str, Any] = {"finish_reason": "abort"}

    def started(self, started: Started) -> None:
        self._prompt_ids = started.prompt_ids

    def delta(self, delta: events.Delta) -> None:
        """Hot path: once for every token."""
        if self._metrics.first_token_time is None and delta.ids:
            self._metrics.first_token_time = time.monotonic()
        self._text.append(delta.text)
        self._ids.append(delta.ids)
        if self._logprobs is not None:
            self._logprobs += logprobs_of(delta) or []
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += prompt_logprobs_of(delta) or []
        if delta.finish is not None:
            if self._metrics.first_token_time is not None:
                self._metrics.last_token_time = time.monotonic()
            self.end = {
                "finish_reason": delta.finish,
                "stop_reason": delta.stop_reason,
                "cached_tokens": delta.cached_tokens,
            }
            self._done(self)

    def failed(self, failed: Failed) -> None:
        if is_refusal(failed):
            self.refusal = RequestError(failed.message, failed.param, failed.code)
        reason, error = _end_of(failed)
        self.end = {"finish_reason": reason, "error": error}
        self._done(self)

    def tokens(self) -> int:
        """Output tokens so far."""
        return sum(map(len, self._ids)) // 4

    def output(self, prompt: str | None) -> RequestOutput:
        """What was gathered, as of a request with this choice alone."""
        cached = self.end.pop("cached_tokens", 0)
        ids = unpack(b"".join(self._ids)).tolist()
        text, logprobs = "".join(self._text), self._logprobs
        completion = CompletionOutput(0, text, ids, logprobs=logprobs, **self.end)
        prompt_ids = unpack(self._prompt_ids).tolist()
        name = self._call.request_id
        return RequestOutput(
            name,
            prompt,
            prompt_ids,
            [completion],
            cached,
            self._metrics,
            self._prompt_logprobs,
        )


def output_of(choices: Sequence[Collector], prompt: str | None) -> RequestOutput:
    """What was gathered of a request; of its prompt the first choice knows."""
    whole, *others = [choice.output(prompt) for choice in choices]
    for index, other in enumerate(others, start=1):
        other.outputs[0].index = index
        whole.outputs += other.outputs
        whole.metrics.add(other.metrics)
    return whole


class DeltaStream:
    """Hands the deltas of one request to whoever waits for them, on one event loop."""

    __slots__ = ("_deltas", "_waiter")

    def __init__(self) -> None:
        self._deltas: deque[Delta | RequestError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Delta:
        """The next delta; raises RequestError if the request was refused."""
        while not self._deltas:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta = self._deltas.popleft()
        if isinstance(delta, RequestError):
            raise delta
        return delta

    def put(self, delta: Delta | RequestError) -> None:
        """The next one."""
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ChoiceStream:
    """The sink of one choice, in front of the stream that all of them share."""

    __slots__ = ("_index", "_received", "_stream")

    def __init__(self, stream: DeltaStream, index: int) -> None:
        self._stream = stream
        self._index = index
        self._received = 0

    def started(self, started: Started) -> None:
        """The prompt's ids are no output."""

    def delta(self, delta: events.Delta) -> None:
        """Hot path: once for every token."""
        ids = unpack_few(delta.ids)
        self._received = delta.token_offset + len(ids)
        self._stream.put(
            Delta(
                delta.text,
                ids,
                delta.token_offset,
                delta.finish,
                delta.stop_reason,
                delta.cached_tokens,
                logprobs=logprobs_of(delta),
                prompt_logprobs=prompt_logprobs_of(delta),
                index=self._index,
            )
        )

    def failed(self, failed: Failed) -> None:
        if is_refusal(failed):
            self._stream.put(RequestError(failed.message, failed.param, failed.code))
            return
        reason, error = _end_of(failed)
        delta = Delta("", [], self._received, reason, error=error, index=self._index)
        self._stream.put(delta)

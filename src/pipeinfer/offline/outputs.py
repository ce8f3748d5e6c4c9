"""Outputs that callers of the offline classes get, and how they are gathered from a request's
deltas.

Knows the gateway's local events; no pipeline and no threads.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeinfer.gateway import ledger
from pipeinfer.gateway.ledger import Call, Failed, Started, num_alternatives
from pipeinfer.messages import TOKEN_BYTES, FinishReason, LogprobTexts
from pipeinfer.wire import NO_ID, logprob_layout, unpack, unpack_few


class RequestError(ValueError):
    """A request that was refused. `param`: what is wrong with it; `code`: OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(slots=True)
class Logprob:
    """The log-prob of a token at one position. rank: 1 is the likeliest. decoded_token: the token
    by itself; U+FFFD is what is only a part of a character."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]  # by id: the token itself, then the likeliest others


@dataclass(slots=True)
class Delta:
    """New output of a streamed request; the reader's own. Not frozen: that would cost four times as
    much, for every token.

    Attributes:
    - offset: output tokens before `token_ids`
    - finish_reason: set on the last delta only, as are the next three
    - stop_reason: the stop string or stop token id, None for the model's own end
    - cached_tokens: prompt tokens found in the prefix cache
    - error: belongs to finish_reason "error"
    - logprobs: of each of token_ids, if asked for
    - prompt_logprobs: of further tokens of the prompt, all of them before the first output token;
      None in place of those of its first one
    - index: of the choice
    - prompt_tokens: of the prompt; of several choices the first alone has them and cached_tokens: a
      prompt counts once
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
    prompt_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """A completion of a prompt.

    Attributes:
    - token_ids: without the stop token, but with those of a stop string
    - stop_reason: the stop string or stop token id, None for the model's own end
    - error: what happened, if finish_reason is "error"
    - logprobs: of each of token_ids, if asked for
    - cumulative_logprob: their sum
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[Logprobs] | None = None
    error: str = ""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probs of token_ids; None if they were not asked for."""
        if self.logprobs is None:
            return None
        chosen = zip(self.token_ids, self.logprobs, strict=True)
        return math.fsum(found[token].logprob for token, found in chosen)

    def finished(self) -> bool:
        """Whether it ended, as all that LLM returns have."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Seconds of time.monotonic(); first_token_time is None if there was no token."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None

    def add(self, other: RequestMetrics) -> None:
        """Adds the times of another choice: the first token of both, and the last."""
        if other.first_token_time is None or other.last_token_time is None:
            return
        if self.first_token_time is None or other.first_token_time < self.first_token_time:
            self.first_token_time = other.first_token_time
        if self.last_token_time is None or other.last_token_time > self.last_token_time:
            self.last_token_time = other.last_token_time


@dataclass(slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
    - outputs: its choices
    - prompt: the text, of a chat what the template made of it; None if only ids were given
    - cached_tokens: how many of the prompt's tokens were found in the prefix cache, for scripts of
      vLLM also num_cached_tokens
    - prompt_logprobs: of each of the prompt's tokens, if asked for; None in place of those of the
      first one
    - lora_request: as it was given
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.monotonic()))
    prompt_logprobs: list[Logprobs | None] | None = None
    lora_request: object = None

    @property
    def finished(self) -> bool:
        """Whether all outputs ended, as all that LLM returns have."""
        return all(output.finished() for output in self.outputs)

    @property
    def num_cached_tokens(self) -> int:
        """cached_tokens, as vLLM calls it."""
        return self.cached_tokens


def logprobs_of(delta: ledger.OutputDelta) -> list[Logprobs] | None:
    """The delta's log-probs in the form of callers; None if the delta has none."""
    return None if delta.logprobs is None else list(_by_position(delta.logprobs, delta.ids))


def prompt_logprobs_of(delta: ledger.OutputDelta) -> list[Logprobs | None] | None:
    """Log-probs of the prompt's tokens in the delta, in the form of callers; None if it has
    none."""
    if delta.prompt is None:
        return None
    return [listed or None for listed in _by_position(delta.prompt, delta.prompt.ids)]


def _by_position(texts: LogprobTexts, raw_ids: bytes) -> Iterator[Logprobs]:
    """Log-probs of each token; an empty dict for the prompt's first token, which has no token
    before it. Hot path: runs once for every token, so no intermediate objects are made."""
    ids = unpack_few(raw_ids)
    most = num_alternatives(texts, len(ids))
    step, names = 1 + most, texts.texts
    for n, words in enumerate(logprob_layout(most).iter_unpack(texts.logprobs)):
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
    """Whether who asks is at fault, and not the pipeline or the time."""
    return failed.code == "asleep" or (failed.status < 500 and failed.status != 408)


def _end_of(failed: Failed) -> tuple[FinishReason, str]:
    """(finish_reason, error) of a failure that is no refusal."""
    if failed.status == 408 or failed.code == "closed":
        return "abort", ""
    return "error", failed.message


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """A call, and what of its answer the caller is to see.

    Attributes:
    - prompt: the text, where the caller gave one
    - detokenize: whether outputs have texts
    - only_prompt: whether outputs have no tokens, either; the call then asks for one, as no step
      computes less
    """

    call: Call
    prompt: str | None = None
    detokenize: bool = True
    only_prompt: bool = False


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
        "_prompt_text",
        "_text",
        "end",
        "output_tokens",
        "prompt_tokens",
        "refusal",
        "vector",
    )

    def __init__(self, call: Call, done: Callable[[Collector], None]) -> None:
        self._call = call
        self._done = done
        self._text: list[str] = []
        self._ids: list[bytes] = []
        self._prompt_ids = b""
        self._prompt_text: str | None = None
        self.prompt_tokens = 0  # once they are known; of the first choice alone
        self.output_tokens = 0  # so far
        params = call.params
        self._logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[Logprobs | None] | None = (
            None if params.prompt_logprobs is None else []
        )
        self._metrics = RequestMetrics(time.monotonic())
        self.refusal: RequestError | None = None
        self.vector = b""  # float32, if asked for
        self.end: dict[str, Any] = {"finish_reason": "abort"}

    def started(self, started: Started) -> None:
        self._prompt_ids = started.prompt_ids
        self.prompt_tokens = started.prompt_tokens
        if self._call.return_prompt_text:
            self._prompt_text = started.prompt_text

    def delta(self, delta: ledger.OutputDelta) -> None:
        """Hot path: once for every token."""
        if self._metrics.first_token_time is None and delta.ids:
            self._metrics.first_token_time = time.monotonic()
        self._text.append(delta.text)
        self._ids.append(delta.ids)
        self.output_tokens += len(delta.ids) // TOKEN_BYTES
        if self._logprobs is not None:
            self._logprobs += logprobs_of(delta) or []
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += prompt_logprobs_of(delta) or []
        if delta.finish is not None:
            if self._metrics.first_token_time is not None:
                self._metrics.last_token_time = time.monotonic()
            self.vector = delta.vector
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

    def output(self) -> RequestOutput:
        """The output so far, as of a request with this choice alone."""
        cached = self.end.pop("cached_tokens", 0)
        ids = unpack(b"".join(self._ids)).tolist()
        text, logprobs = "".join(self._text), self._logprobs
        completion = CompletionOutput(0, text, ids, logprobs=logprobs, **self.end)
        prompt_ids = unpack(self._prompt_ids).tolist()
        name = self._call.request_id
        return RequestOutput(
            name,
            self._prompt_text,
            prompt_ids,
            [completion],
            cached,
            self._metrics,
            self._prompt_logprobs,
        )


class Progress:
    """How far a batch is: `ended` of its choices, and the tokens so far. Written on one thread,
    read on any."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.ended = 0
        self.choices: list[Collector] = []

    def is_over(self) -> bool:
        """Whether all choices ended."""
        return self.ended == self.total

    def tokens(self) -> tuple[int, int]:
        """(of prompts, of outputs)"""
        choices = self.choices
        return sum(c.prompt_tokens for c in choices), sum(c.output_tokens for c in choices)


def output_of(choices: Sequence[Collector], call: OfflineRequest) -> RequestOutput:
    """The output of a request with all its choices; the first choice has the prompt."""
    whole, *others = [choice.output() for choice in choices]
    for index, other in enumerate(others, start=1):
        other.outputs[0].index = index
        whole.outputs += other.outputs
        whole.metrics.add(other.metrics)
    if call.prompt is not None:
        whole.prompt = call.prompt
    for output in whole.outputs:
        if not call.detokenize:
            output.text = ""
        if call.only_prompt:
            _clear(output)
    return whole


def _clear(output: CompletionOutput | Delta) -> None:
    """Takes away the one token that a request without output has computed nevertheless."""
    output.text, output.token_ids, output.stop_reason = "", [], None
    output.logprobs = None if output.logprobs is None else []
    if output.finish_reason == "stop":
        output.finish_reason = "length"


class DeltaStream:
    """Hands the deltas of one request to the coroutine that waits for them."""

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
        """Adds the next delta, or the error that ends the stream."""
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ChoiceStream:
    """The sink of one choice, in front of the stream that all of them share."""

    __slots__ = ("_call", "_index", "_prompt_tokens", "_received", "_stream")

    def __init__(self, stream: DeltaStream, index: int, call: OfflineRequest) -> None:
        self._stream = stream
        self._index = index
        self._received = 0
        self._prompt_tokens = 0
        self._call = call

    def started(self, started: Started) -> None:
        self._prompt_tokens = started.prompt_tokens

    def delta(self, delta: ledger.OutputDelta) -> None:
        """Hot path: once for every token."""
        ids = unpack_few(delta.ids)
        self._received = delta.token_offset + len(ids)
        made = Delta(
            delta.text if self._call.detokenize else "",
            ids,
            delta.token_offset,
            delta.finish,
            delta.stop_reason,
            delta.cached_tokens,
            logprobs=logprobs_of(delta),
            prompt_logprobs=prompt_logprobs_of(delta),
            index=self._index,
            prompt_tokens=self._prompt_tokens,
        )
        if self._call.only_prompt:
            _clear(made)
        self._stream.put(made)

    def failed(self, failed: Failed) -> None:
        if is_refusal(failed):
            self._stream.put(RequestError(failed.message, failed.param, failed.code))
            return
        reason, error = _end_of(failed)
        delta = Delta("", [], self._received, reason, error=error, index=self._index)
        self._stream.put(delta)


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a text (`embedding`)."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers the vector has."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The vector of one text, with the text's ids; num_cached_tokens: as in RequestOutput."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """True: there is no vector before the end."""
        return True


@dataclass(slots=True)
class ScoringOutput:
    """score: how well the second text fits to the first."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The score of one pair."""

    request_id: str
    outputs: ScoringOutput

    @property
    def finished(self) -> bool:
        """True: there is no score before the end."""
        return True


def vector_of(collector: Collector) -> bytes:
    """The vector as float32 bytes. Raises RequestError if the request ended without it."""
    if not collector.vector:
        raise RequestError(str(collector.end.get("error") or "the request was aborted"))
    return collector.vector

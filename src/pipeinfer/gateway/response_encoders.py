"""From a request's deltas to the bytes of its response, and on to the client.

- ResponseEncoder: deltas to bytes. FullResponseEncoder makes one body, StreamEncoder chunks, in
  OpenAI's form; APIs that are translated have encoders of their own.
- ChoiceCollector: what a choice has so far. BestOf: chooses among choices.
- FullResponse, EventStream: sinks of a session, each in front of an encoder; one sends a whole
  body, the other server-sent events. A stream writes its chunks to the connection once in an
  iteration of the loop: no task, no future and no queue for a token, and one write for all tokens
  that came together.

Knows no core.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from pipeinfer.gateway.connections import PROBE
from pipeinfer.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError
from pipeinfer.gateway.ledger import (
    Failed,
    OutputDelta,
    Started,
    TokenLogprobs,
    decode_logprobs,
    decode_prompt_logprobs,
)
from pipeinfer.gateway.response_json import (
    DONE,
    NULL,
    ChatLogprobs,
    ChunkEncoder,
    CompletionLogprobs,
    FinishedChoice,
    ParsedOutput,
    PromptLogprobsOfRequest,
    ResponseMetadata,
    TokenUsage,
    encode_response,
)
from pipeinfer.gateway.tool_parsers.base import ChoiceParser, ParsedDelta
from pipeinfer.messages import FinishReason
from pipeinfer.wire import unpack


class ResponseEncoder(Protocol):
    """Encodes one response. `index`: number of the choice, over all prompts."""

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        ...

    def started(self, index: int, started: Started) -> None:
        """Comes before the first delta."""
        ...

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        """The bytes to send now; of a full response all of them, when it is complete."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The bytes that end a stream that cannot go on."""
        ...


class FullResponseEncoder:
    """Collects all choices, then encodes them at once. `best`: chooses those that are returned."""

    def __init__(
        self, metadata: ResponseMetadata, choices: int, best: BestOf | None = None
    ) -> None:
        self._metadata = metadata
        self._best = best
        self._collectors = [ChoiceCollector(metadata) for _ in range(choices)]
        self._choices: list[FinishedChoice | None] = [None] * choices
        self._unfinished = choices
        self._usage = TokenUsage()

    @property
    def ended(self) -> bool:
        return self._unfinished == 0

    def started(self, index: int, started: Started) -> None:
        self._collectors[index].started(started)

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        if self._best is not None:
            delta = self._best.add(index, delta)
        delta, collector = requested_part(self._metadata, delta), self._collectors[index]
        collector.add(delta)
        if delta.finish is None:
            return b""
        self._choices[index] = collector.full_choice(delta.finish, delta.stop_reason)
        self._usage.add(delta, collector.reasoning_tokens)
        self._unfinished -= 1
        return b"" if self._unfinished else self._encoded_body()

    def _encoded_body(self) -> bytes:
        order = range(len(self._choices)) if self._best is None else self._best.best_choices()
        choices = [choice for n in order if (choice := self._choices[n]) is not None]
        return encode_response(self._metadata, choices, self._usage)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class StreamEncoder:
    """Encodes each delta as chunks of text, or of parsed deltas."""

    def __init__(
        self,
        metadata: ResponseMetadata,
        choices: int,
        include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:
        """`continuous_usage`: each chunk carries the usage so far."""
        self._metadata = metadata
        self._chunks = ChunkEncoder(metadata, choices, include_usage, continuous_usage)
        self._collectors = [ChoiceCollector(metadata) for _ in range(choices)]
        self._include_usage = include_usage
        self._choice_started = [False] * choices
        self._unfinished = choices
        self._usage = TokenUsage()
        # Whether all chunks between the first and the last are text, and nothing else.
        self._text_only = not (
            metadata.output_options.has_logprobs_or_ids
            or metadata.parser_factory
            or continuous_usage
        )

    @property
    def ended(self) -> bool:
        return self._unfinished == 0

    def started(self, index: int, started: Started) -> None:
        self._collectors[index].started(started)
        self._chunks.started(index, started)

    def delta(self, index: int, delta: OutputDelta) -> bytes:
        if self._text_only and delta.finish is None and self._choice_started[index]:
            # The hot path: every token of nearly every stream.
            return self._chunks.text_chunk(index, delta.text) if delta.text else b""
        chunks, options = self._chunks, self._metadata.output_options
        parsed = self._collectors[index].parse(delta)
        chunks.count(index, delta, self._collectors[index].reasoning_tokens)
        opening, logprobs = b"", NULL
        if options.has_logprobs_or_ids:
            delta = requested_part(self._metadata, delta)
            if delta.prompt is not None:
                self._collectors[index].add_logprobs(delta)
        has_extras = delta.logprobs is not None or (options.token_ids and bool(delta.ids))
        if delta.finish is None and not delta.text and not has_extras:
            return b""
        first = not self._choice_started[index]
        if first:
            self._choice_started[index] = True
            opening = self._first_chunks(index)
        if delta.logprobs is not None:  # also where the text of its tokens comes later
            self._collectors[index].add_logprobs(delta)
            logprobs = self._collectors[index].take_logprobs()
        if options.token_ids:
            with_prompt_ids = first and not self._metadata.chat
            logprobs = self._collectors[index].with_token_ids(logprobs, delta, with_prompt_ids)
        if self._metadata.parser_factory is not None:
            data = opening + self._parsed_chunks(index, delta, parsed, logprobs)
        elif delta.finish is not None:
            choice = FinishedChoice(delta.text, delta.finish, delta.stop_reason, logprobs)
            data = opening + chunks.last_text_chunk(index, choice)
        elif has_extras:
            data = opening + chunks.text_chunk_with_logprobs(index, delta.text, logprobs)
        else:
            data = opening + chunks.text_chunk(index, delta.text)
        if delta.finish is not None:
            data += self._finish(index, delta)
        return data

    def error(self, error: ApiError) -> bytes:
        return self._chunks.error_chunk(error)

    def _first_chunks(self, index: int) -> bytes:
        """The chunks before a choice's first text."""
        collector = self._collectors[index]
        data = self._chunks.role_chunk(index, collector.prompt_ids)
        if self._metadata.output_options.echo:
            data += self._chunks.text_chunk_with_logprobs(
                index, collector.prompt_text, collector.take_logprobs()
            )
        return data

    def _parsed_chunks(
        self, index: int, delta: OutputDelta, parsed: Sequence[ParsedDelta], logprobs: bytes
    ) -> bytes:
        """The chunks of a delta, one for each parsed delta; log-probs go with the first."""
        chunks, collector = self._chunks, self._collectors[index]
        data: list[bytes] = []
        for parsed_delta in parsed:
            data.append(chunks.parsed_chunk(index, parsed_delta, logprobs))
            logprobs = NULL
        if delta.finish is not None:
            data.append(chunks.finish_chunk(index, collector.finished_choice(delta, logprobs)))
        elif logprobs != NULL:
            data.append(chunks.logprobs_chunk(index, logprobs))
        return b"".join(data)

    def _finish(self, index: int, delta: OutputDelta) -> bytes:
        """The bytes behind the last chunk of a choice: usage and [DONE] after the last choice, else
        none."""
        self._usage.add(delta, self._collectors[index].reasoning_tokens)
        self._unfinished -= 1
        if self._unfinished:
            return b""
        return (self._chunks.usage_chunk(self._usage) if self._include_usage else b"") + DONE


_json = msgspec.json.Encoder()


def requested_part(metadata: ResponseMetadata, delta: OutputDelta) -> OutputDelta:
    """The part of `delta` that the client asked for: with no_new_tokens, one token was sampled
    anyway.
    """
    if not metadata.output_options.no_new_tokens:
        return delta
    finish = "length" if delta.finish == "stop" else delta.finish
    return msgspec.structs.replace(
        delta, text="", ids=b"", finish=finish, stop_reason=None, output_tokens=0, logprobs=None
    )


class ChoiceCollector:
    """Collects the deltas of one choice: text, parsed output, log-probs, token ids.

    Attributes:
    - prompt_text: the echoed prompt, before all output
    - prompt_ids: of the prompt, if ids are asked for; else None
    """

    __slots__ = (
        "_chat",
        "_completion",
        "_echo",
        "_ids",
        "_parsed",
        "_parser",
        "_parser_factory",
        "_prompt",
        "_texts",
        "prompt_ids",
        "prompt_text",
    )

    def __init__(self, metadata: ResponseMetadata) -> None:
        options = metadata.output_options
        alternatives, of_prompt = options.logprobs, options.prompt_logprobs
        self._chat = ChatLogprobs() if metadata.chat and alternatives is not None else None
        self._completion: CompletionLogprobs | None = None
        if alternatives is not None and not metadata.chat:
            self._completion = CompletionLogprobs(alternatives)
        self._prompt = None if of_prompt is None else PromptLogprobsOfRequest(of_prompt)
        self._echo = options.echo
        self._texts: list[str] = []
        self._parser_factory = metadata.parser_factory
        self._parser: ChoiceParser | None = None
        self._parsed = ParsedOutput()
        self._ids: list[int] | None = [] if options.token_ids else None
        self.prompt_text = ""
        self.prompt_ids: list[int] | None = None

    def started(self, started: Started) -> None:
        """Comes before the first delta."""
        self.prompt_text = started.prompt_text
        if self._parser_factory is not None:
            self._parser = self._parser_factory(started.reasoning)
        if self._ids is not None:
            self.prompt_ids = unpack(started.prompt_ids).tolist()

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens so far, as far as is certain."""
        return 0 if self._parser is None else self._parser.reasoning.count

    def add(self, delta: OutputDelta) -> None:
        """Keeps all of the delta."""
        self._texts.append(delta.text)
        if self._parser is not None:
            self._parser.reasoning.add_offsets(delta.offsets)
        if self._ids is not None:
            self._ids += unpack(delta.ids).tolist()
        self.add_logprobs(delta)

    def add_logprobs(self, delta: OutputDelta) -> None:
        """Keeps the delta's log-probs, and those of the prompt."""
        if delta.prompt is not None:
            of_prompt = list(decode_prompt_logprobs([delta.prompt]))
            if self._prompt is not None:
                self._prompt.add(of_prompt)
            if self._completion is not None and self._echo:
                self._completion.add(of_prompt)
        if delta.logprobs is not None:
            self._add(list(decode_logprobs([(delta.logprobs, delta.ids)])))

    def _add(self, logprobs: list[TokenLogprobs]) -> None:
        if self._chat is not None:
            self._chat.add(logprobs)
        if self._completion is not None:
            self._completion.add(logprobs, len(self.prompt_text))

    def parse(self, delta: OutputDelta) -> Sequence[ParsedDelta]:
        """The parsed deltas that are certain now; none where all output is content."""
        if self._parser is None:
            return ()
        self._parser.reasoning.add_offsets(delta.offsets)
        deltas = [*self._parser.feed(delta.text)]
        if delta.finish is not None:
            deltas += self._parser.finish()
        self._parsed.add(deltas)
        return deltas

    def finished_choice(self, delta: OutputDelta, logprobs: bytes) -> FinishedChoice:
        """The end of a choice whose parsed deltas were sent."""
        assert delta.finish is not None
        return FinishedChoice("", delta.finish, delta.stop_reason, logprobs, parsed=self._parsed)

    def take_logprobs(self) -> bytes:
        """`logprobs` of all tokens since the last call, as JSON; null if not asked for."""
        logprobs = self._completion if self._chat is None else self._chat
        return NULL if logprobs is None else logprobs.take()

    def with_token_ids(self, logprobs: bytes, delta: OutputDelta, first: bool) -> bytes:
        """The JSON behind the key `logprobs` of a chunk: log-probs, then the token ids. `first`: of
        a completion, with those of the prompt.
        """
        if self._ids is None:
            return logprobs
        fields = b'%s,"token_ids":%s' % (logprobs, _json.encode(unpack(delta.ids).tolist()))
        if first and self.prompt_ids is not None:
            fields += b',"prompt_token_ids":%s' % _json.encode(self.prompt_ids)
        return fields

    def full_choice(self, finish: FinishReason, stop_reason: str | int | None) -> FinishedChoice:
        """The choice with all of its text, log-probs and calls."""
        text = self.prompt_text + "".join(self._texts)
        of_prompt = None if self._prompt is None else self._prompt.take()
        parsed = None
        if self._parser is not None:
            parsed = ParsedOutput()
            parsed.add((*self._parser.feed(text), *self._parser.finish()))
        return FinishedChoice(
            text,
            finish,
            stop_reason,
            self.take_logprobs(),
            of_prompt,
            parsed,
            self._ids,
            self.prompt_ids,
        )


class BestOf:
    """Chooses the likeliest of several choices of a prompt, by the mean log-prob of a token
    (best_of).

    Arguments:
    - choices: number of all choices
    - per_prompt: choices that are computed of each prompt
    - returned: choices of each prompt that are returned
    - with_logprobs: the client asked for log-probs as well
    """

    def __init__(self, choices: int, per_prompt: int, returned: int, with_logprobs: bool) -> None:
        self._per_prompt = per_prompt
        self._returned = returned
        self._with_logprobs = with_logprobs
        self._sums = [0.0] * choices
        self._tokens = [0] * choices

    def add(self, index: int, delta: OutputDelta) -> OutputDelta:
        """Counts a delta; returns the part that the client asked for."""
        if delta.logprobs is None:
            return delta
        for position in decode_logprobs([(delta.logprobs, delta.ids)]):
            self._sums[index] += position.sampled.logprob
            self._tokens[index] += 1
        return delta if self._with_logprobs else msgspec.structs.replace(delta, logprobs=None)

    def best_choices(self) -> list[int]:
        """Indices of the returned choices, each prompt's best first; of equals the earlier. A
        choice without tokens is worse than any other.
        """
        best: list[int] = []
        for first in range(0, len(self._sums), self._per_prompt):
            choices = range(first, first + self._per_prompt)
            best += sorted(choices, key=self._mean, reverse=True)[: self._returned]
        return best

    def _mean(self, index: int) -> float:
        tokens = self._tokens[index]
        return self._sums[index] / tokens if tokens else float("-inf")


MAX_UNREAD = 8 * 2**20  # bytes that a client may leave unread before its request is aborted
EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def api_error(failed: Failed) -> ApiError:
    """The error for the client, of a Failed of the core."""
    return ApiError(failed.status, failed.message, failed.param, failed.code, failed.retry_after)


Settle = Callable[[], Awaitable[None]]


class FullResponse:
    """Waits until the answer is complete, then sends one body. settle(): awaited before that."""

    def __init__(self, encoder: ResponseEncoder, settle: Settle | None = None) -> None:
        self._encoder = encoder
        self._settle = settle
        self._content = b""
        # The result is why the request failed, or None. An exception in the future would keep the
        # future, and with it the connection, until the garbage collector comes.
        self._done: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        self._encoder.started(index, started)

    def delta(self, index: int, delta: OutputDelta) -> None:
        self._content = self._encoder.delta(index, delta)
        if self._encoder.ended and not self._done.done():
            self._done.set_result(None)

    def failed(self, index: int, failed: Failed) -> None:
        if not self._done.done():
            self._done.set_result(failed)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Waits for the end; raises ApiError if any choice failed."""
        failed = await self._done
        if failed is not None:
            raise api_error(failed)
        if self._settle is not None:
            await self._settle()
        return web.Response(body=self._content, content_type="application/json")


class _StreamResponse(web.StreamResponse):
    """A response whose head is sent together with its first chunk."""

    _send_headers_immediately = False


class WriteBatch:
    """The streams that have something to send in this iteration of the loop.

    A write costs more than all else that is done for a token. Where the gateway falls behind, the
    tokens of several steps wait in its inbox; they are read in one iteration, and leave together.
    """

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """The stream is flushed when all messages that have come are read."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class EventStream:
    """Sends chunks as they come, those of one iteration of the loop together.

    Nothing is sent before the first chunk, so that a refusal is an error with its own status.

    Attributes:
    - settle(): awaited before the last chunk is sent
    - _buffered: chunks of this iteration, or from before the headers
    - _transport: None before the headers
    """

    def __init__(
        self, encoder: ResponseEncoder, batch: WriteBatch, settle: Settle | None = None
    ) -> None:
        self._encoder = encoder
        self._batch = batch
        self._settle = settle
        self._last = b""
        self._buffered: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = True
        loop = asyncio.get_running_loop()
        self._first_chunk: asyncio.Future[Failed | None] = loop.create_future()  # as FullResponse's
        self._ended: asyncio.Future[None] = loop.create_future()

    def started(self, index: int, started: Started) -> None:
        self._encoder.started(index, started)

    def delta(self, index: int, delta: OutputDelta) -> None:
        if self._ended.done():
            return
        data = self._encoder.delta(index, delta)  # hot path: every token of every stream
        if delta.finish is not None and self._encoder.ended:
            self._end(data)
        elif data:
            self._write(data)

    def failed(self, index: int, failed: Failed) -> None:
        if self._ended.done():
            return
        if not self._first_chunk.done():
            self._first_chunk.set_result(failed)
            return
        self._end(self._encoder.error(api_error(failed)))

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Streams until the end; raises ApiError if the request fails before its first chunk."""
        failed = await self._first_chunk
        if failed is not None:
            raise api_error(failed)
        response = _StreamResponse(headers=EVENT_STREAM_HEADERS)
        try:
            await response.prepare(request)
            self._chunked = request.version >= HttpVersion11
            self._transport = request.transport  # later chunks are written there by flush()
            request[PROBE] = self._write_comment
            if self._buffered:
                await response.write(self._take_buffered())  # may wait for the client afterwards
        except ConnectionResetError:  # the client has left; aiohttp finds that out once more
            return web.StreamResponse(status=CLIENT_CLOSED_REQUEST)
        await self._ended
        if self._settle is not None:
            await self._settle()
        with contextlib.suppress(ConnectionResetError):  # the client left during the last chunk
            await response.write_eof(self._take_buffered() + self._last)
        return response

    def _write_comment(self) -> None:
        """Sends a comment, which clients ignore. The host of a client that is gone answers it with
        a reset."""
        if not self._ended.done():
            self._write(b":\n\n")

    def _end(self, last: bytes) -> None:
        """The last chunk leaves with the others of this iteration; one that has to wait for
        settle() is what respond() ends the response with."""
        self._ended.set_result(None)
        if self._settle is None and last:
            self._write(last)
            return
        self._last = last
        if not self._first_chunk.done():
            self._first_chunk.set_result(None)

    def _write(self, data: bytes) -> None:
        if not self._buffered:
            if self._transport is not None:
                self._batch.add(self)
            elif not self._first_chunk.done():
                self._first_chunk.set_result(None)
        self._buffered.append(data)

    def _take_buffered(self) -> bytes:
        """Empties the buffer, and returns what was in it."""
        buffered = self._buffered
        data = buffered[0] if len(buffered) == 1 else b"".join(buffered)
        buffered.clear()
        return data

    def flush(self) -> None:
        """Writes what is buffered to the connection; aborts a client that leaves too much
        unread."""
        transport = self._transport
        if not self._buffered or transport is None:
            return
        data = self._take_buffered()
        if transport.get_write_buffer_size() > MAX_UNREAD:
            transport.abort()  # ends the handler, and with it the request
        elif not transport.is_closing():
            transport.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)

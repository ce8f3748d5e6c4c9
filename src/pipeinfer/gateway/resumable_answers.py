"""Answers that go on without the connection that asked for them.

- ResumableAnswer: a sink that puts an answer's events into a resumable stream.
- ResumableAnswers: runs the requests of resumable answers as tasks of their own, and writes streams
  to the connections that read them.
- StreamFormat: how the events of a resumable stream are written, as plain data. It travels with
  each request of the stream (Retention.format) and comes back from tokenizers, or from detokenizers
  where the tokenizer died too. All other stages do not look into it. So another gateway writes the
  same events of the same tokens. It holds no key, and of prompts the input items of /v1/responses
  alone, which that API gives back.
- encoder_for: the encoder of a format.

A stream waits for its readers, never the other way round: what a slow client has not read stays
here, within the bounds of ResumableStreams, and once only however many read it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11
from msgspec.structs import replace

from pipeinfer.core import SuspendAwareClock
from pipeinfer.gateway.anthropic import MessagesFormatter
from pipeinfer.gateway.connections import PROBE
from pipeinfer.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError, json_response
from pipeinfer.gateway.ledger import Failed, OutputDelta, Started
from pipeinfer.gateway.requests import ParsedRequest
from pipeinfer.gateway.response_encoders import (
    EVENT_STREAM_HEADERS,
    ResponseEncoder,
    Settle,
    StreamEncoder,
    api_error,
)
from pipeinfer.gateway.response_json import ResponseMetadata
from pipeinfer.gateway.responses_api import InputItem, ResponsesFormatter
from pipeinfer.gateway.retention import (
    MAX_PARTITIONS,
    ResumableStream,
    ResumableStreams,
    RetentionBounds,
    RetentionPolicy,
    StreamGone,
    StreamReader,
    StreamsFull,
    StreamUnknown,
)
from pipeinfer.gateway.tool_parsers.registry import OutputParsers, ParserOptions
from pipeinfer.gateway.translation import TranslatedEncoder, server_sent_event
from pipeinfer.params import JsonObject

log = logging.getLogger(__name__)

DETACHED = "x-pipeinfer-detached"  # header of requests: seconds for which the answer is kept
# Header of requests: seconds for which the answer waits for its client, in place of --reattach.
REATTACH = "x-pipeinfer-reattach"
STREAM_ID = "x-pipeinfer-stream"  # header of resumable streams: their id
MAX_RETENTION_SECONDS = 86_400.0
BACKGROUND_SECONDS = 600.0  # seconds for which a background response is kept after its end
WRITE_BYTES = 64 * 2**10  # bytes, about, that are written to a connection at once
# Seconds that a client waits, at most, for answers of the gateway before this one to be known.
ADOPTION_SECONDS = 5.0
# Seconds between two looks at streams whose time is over; less than MAX_TICK_GAP.
EXPIRE_INTERVAL = 0.5
EVENT_END = b"\n\n"
# A comment is no event of its own here: clients that have seen an id take an empty line for one.
PROBE_COMMENT = b":\n"
FULL = "other answers that are kept leave no room for this one"


@dataclass(frozen=True)
class RetainedResponse:
    """A response of /v1/responses that is retained, beside its stream.

    Attributes:
    - formatter: knows how far it is
    - background: it was asked for without a connection
    - input: of the request's body
    """

    formatter: ResponsesFormatter
    background: bool
    input: str | list[InputItem]


@dataclass(frozen=True)
class AnswerRetention:
    """How the answer to a request is retained.

    Attributes:
    - name: id of the stream
    - policy: how long
    - response: None for other APIs
    - answers_at_once: the client gets the response as it is when its prompt was accepted
    - format: how another gateway writes it (an encoded StreamFormat); empty: none can
    - partitions: of its events
    - tail: events that come behind all choices
    """

    name: str
    policy: RetentionPolicy
    response: RetainedResponse | None = None
    answers_at_once: bool = False
    format: bytes = b""
    partitions: int = 1
    tail: int = 1

    @property
    def size(self) -> int:
        """Bytes that are kept beside the events."""
        given = len(msgspec.json.encode(self.response.input)) if self.response else 0
        return given + len(self.format)


def retention_policy(
    request: web.Request, streams: bool, reattach: float
) -> RetentionPolicy | None:
    """How long a stream of this request is kept without a connection; None: not at all.

    Raises ApiError 400 for a malformed header, and for one on a request that does not stream.
    """
    name = DETACHED if DETACHED in request.headers else REATTACH
    given = request.headers.get(name)
    if given is None:
        return RetentionPolicy(False, reattach) if streams and reattach else None
    seconds = _seconds(given)
    if not 0 < seconds <= MAX_RETENTION_SECONDS:
        message = f"{name} must be a number of seconds, at most {MAX_RETENTION_SECONDS:.0f}"
        raise ApiError(400, message, name, "invalid_value")
    if not streams:
        message = f"{name} is for streams: set stream to true"
        raise ApiError(400, message, name, "invalid_value")
    return RetentionPolicy(name == DETACHED, seconds)


def _seconds(text: str) -> float:
    """The number; not a number for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


class ResumableAnswer:
    """Encodes an answer into events of `stream`.

    Attributes:
    - accepted: done when the client may have the head of its answer: with None, or with the error
      that it gets instead. A detached answer is accepted with its prompt, since its client must
      know its id; another one with its first event.
    - ended: done when nothing more comes from the pipeline. The last events wait for finish().
    - request_ids: of its choices, which the pipeline keeps until they are released
    """

    def __init__(
        self,
        encoder: ResponseEncoder,
        streams: ResumableStreams,
        stream: ResumableStream,
        retention: AnswerRetention,
        clock: Callable[[], float],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.stream = stream
        self.request_ids: list[str] = []
        self.accepted: asyncio.Future[ApiError | None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.retained_response = retention.response
        self._tail = retention.tail
        self._encoder: ResponseEncoder | None = encoder
        self._streams = streams
        self._clock = clock
        self._last: list[tuple[int, list[bytes]]] = []  # partitions, and their events

    # --------------------------------------------------------------------------- as a ResponseSink

    def started(self, index: int, started: Started) -> None:
        if self._encoder is None:
            return
        self._encoder.started(index, started)
        response = self.retained_response
        if response is not None and response.background:
            queued = b"".join(map(server_sent_event, response.formatter.queued_events()))
            self._append(0, _events(queued))
        if self.stream.policy.detached:
            self._accept(None)

    def delta(self, index: int, delta: OutputDelta) -> None:
        encoder = self._encoder
        if encoder is None:
            return
        events = _events(encoder.delta(index, delta))
        partition, behind = self._partitions(index)
        if delta.finish is None or not encoder.ended:
            self._append(partition, events)
            if events:
                self._accept(None)
        elif partition == behind:
            self._end((partition, events))
        else:
            self._end((partition, events[: -self._tail]), (behind, events[-self._tail :]))

    def failed(self, index: int, failed: Failed) -> None:
        self.fail(api_error(failed))

    # ---------------------------------------------------------------------------------------- ends

    def fail(self, error: ApiError) -> None:
        """Ends the answer with an error; it is the whole answer if none was accepted."""
        if self._encoder is None:
            return
        if self.accepted.done():
            self._end((self._partitions(0)[1], _events(self._encoder.error(error))))
        else:
            self._accept(error)
            self._end()

    def cancel(self) -> None:
        """Ends a response as its client wishes; one that has ended stays as it is."""
        if self._encoder is not None and self.retained_response is not None:
            event = self.retained_response.formatter.cancelled_event()
            self._end((0, [server_sent_event(event)]))

    def accept(self) -> None:
        """Marks the answer as accepted: its client got the head from another gateway."""
        self._accept(None)

    def finish(self) -> None:
        """Gives the readers the last events."""
        for partition, events in self._last:
            self._append(partition, events)
        self._streams.end(self.stream, self._clock())
        self._last = []
        if self.retained_response is not None:
            self.retained_response.formatter.clear()
        self._accept(None)

    @property
    def is_background(self) -> bool:
        """Whether clients ask for it by its id, more than once."""
        return self.retained_response is not None and self.retained_response.background

    def response(self) -> JsonObject:
        """The response as far as it is. Raises ApiError 410 for one that is too large."""
        assert self.retained_response is not None
        if not self.stream.ended:
            return self.retained_response.formatter.snapshot()
        _, _, data = self.stream.last_event.partition(b"data: ")
        if not data:
            raise gone(self.stream.name, StreamGone("it is larger than what may be kept"))
        return msgspec.json.decode(data)["response"]

    def _end(self, *last: tuple[int, list[bytes]]) -> None:
        self._encoder, self._last = None, [*last]
        self.ended.set_result(None)

    def _partitions(self, index: int) -> tuple[int, int]:
        """The partition of a choice's events, and that of the events behind all choices."""
        behind = len(self.stream.counts) - 1
        return min(index, behind), behind

    def _append(self, partition: int, events: list[bytes]) -> None:
        self._streams.append(self.stream, events, self._clock(), partition)

    def _accept(self, error: ApiError | None) -> None:
        if not self.accepted.done():
            self.accepted.set_result(error)


def _events(data: bytes) -> list[bytes]:
    return [event + EVENT_END for event in data.split(EVENT_END) if event]


Session = AbstractAsyncContextManager[None]


class ResumableAnswers:
    """The resumable answers of a gateway.

    Attributes:
    - reattach: seconds for which other streams than detached ones wait for their client
    - release(): called with ids of requests that the pipeline need not keep any more
    - abandon(): with those that go on without this gateway
    - claim(): with those that another gateway had begun, and for which a client has come back
    """

    def __init__(
        self,
        bounds: RetentionBounds,
        reattach: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        release: Callable[[list[str]], None] = lambda _: None,
        abandon: Callable[[list[str]], None] = lambda _: None,
        claim: Callable[[list[str]], None] = lambda _: None,
    ) -> None:
        self.reattach = reattach
        self._release = release
        self._abandon = abandon
        self._claim = claim
        self._adopted = asyncio.Event()  # all answers of the gateway before this one
        self.streams = ResumableStreams(bounds, self._on_drop)
        self._read_clock = clock
        self._suspend_aware_clock = SuspendAwareClock()
        self._answers: dict[str, ResumableAnswer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    def _clock(self) -> float:
        """Seconds, without those in which this process was stopped: a client that came back
        meanwhile could not be heard."""
        return self._suspend_aware_clock.at(self._read_clock())

    @property
    def running(self) -> bool:
        """Whether a resumable answer is being computed that would end with this gateway."""
        return any(not self._answers[name].request_ids for name in self._tasks)

    def open(
        self, retention: AnswerRetention, owner: str, encoder: ResponseEncoder
    ) -> ResumableAnswer:
        """A sink for the answer, which is `owner`'s. Raises ApiError 429."""
        name, now = retention.name, self._clock()
        try:
            stream = self.streams.open(
                name, owner, retention.policy, retention.size, now, retention.partitions
            )
        except StreamsFull:
            raise ApiError(429, FULL, code="too_much_kept", retry_after=1) from None
        answer = ResumableAnswer(encoder, self.streams, stream, retention, self._clock)
        self._answers[name] = answer
        if self._sweeper is None:
            self._sweep()
        return answer

    def run(
        self,
        answer: ResumableAnswer,
        session: Session,
        release: Callable[[], None],
        settle: Settle | None = None,
    ) -> None:
        """Runs the session, whose events `answer` gets.

        release(): called when the session is over. settle(): awaited before the last events.
        """
        name = answer.stream.name
        task = asyncio.create_task(_run(answer, session, release, settle))
        self._tasks[name] = task
        task.add_done_callback(lambda ended: self._forget(name, ended))

    async def respond(
        self,
        request: web.Request,
        retention: AnswerRetention,
        answer: ResumableAnswer,
        session: Session,
        release: Callable[[], None],
        settle: Settle | None = None,
    ) -> web.StreamResponse:
        """Runs the answer as `run` does, and answers the client that asked. Raises ApiError if
        there is no answer. A client that leaves before the answer was accepted knows no id, so its
        request ends."""
        name, changed = retention.name, asyncio.Event()
        reader = None
        if not retention.answers_at_once:
            reader = self.streams.attach(answer.stream, (), changed.set)
        self.run(answer, session, release, settle)
        error: ApiError | None = ApiError(503, "the request was dropped")
        try:
            error = await answer.accepted
        finally:
            if error is not None:
                self.streams.drop(name)
        if error is not None:
            raise error
        if reader is None:
            return json_response(answer.response())
        return await self._write(request, answer.stream, reader, changed)

    async def stream(
        self, request: web.Request, stream: ResumableStream, had: Sequence[int]
    ) -> web.StreamResponse:
        """Writes the events that come after `had` so many of each partition. Raises ApiError 400 or
        410."""
        changed = asyncio.Event()
        try:
            reader = self.streams.attach(stream, had, changed.set)
        except ValueError as error:
            raise ApiError(400, f"{stream.name}: {error}", code="invalid_value") from None
        except StreamGone as error:
            raise gone(stream.name, error) from None
        answer = self._answers.get(stream.name)
        if stream.rewritten and answer is not None:
            self._claim(answer.request_ids)
        return await self._write(request, stream, reader, changed)

    def on_adopted(self) -> None:
        """All answers of the gateway before this one are known."""
        self._adopted.set()

    async def answer(self, name: str, owner: str) -> ResumableAnswer:
        """Raises StreamUnknown or StreamGone; ApiError 503 if it may still have to be adopted."""
        try:
            async with asyncio.timeout(ADOPTION_SECONDS):
                await self._adopted.wait()
        except TimeoutError:
            message = "kept answers are not known yet, since this gateway was started again"
            raise ApiError(503, message, code="starting", retry_after=1) from None
        answer = self._answers[self.streams.find(name, owner).name]
        task = self._tasks.get(name)
        if task is not None and answer.stream.rewritten and answer.ended.done():
            await asyncio.wait({task})  # it had ended before, and clients may have seen that
        return answer

    async def find(self, name: str, owner: str) -> ResumableAnswer:
        """Raises ApiError 404, 410 or 503."""
        try:
            return await self.answer(name, owner)
        except StreamGone as error:
            raise gone(name, error) from None
        except StreamUnknown:
            raise ApiError(404, f"there is no {name[:200]!r}", code="stream_not_found") from None

    async def cancel(self, answer: ResumableAnswer) -> None:
        """Ends a response that runs; returns when it has its last event."""
        task = self._tasks.get(answer.stream.name)
        answer.cancel()
        if task is not None:
            await asyncio.wait({task})

    async def delete(self, answer: ResumableAnswer) -> None:
        """Forgets an answer; returns when it runs no more."""
        task = self._tasks.get(answer.stream.name)
        self.streams.drop(answer.stream.name)
        if task is not None:
            await asyncio.wait({task})

    def leave(self) -> None:
        """Leaves all answers to the gateway that comes after this one; readers lose theirs."""
        for answer in list(self._answers.values()):
            if answer.request_ids:
                self._abandon(answer.request_ids)
                answer.request_ids = []
                self.streams.drop(answer.stream.name)

    def close(self) -> None:
        """Drops all streams and answers."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for name in list(self._answers):
            self.streams.drop(name)

    async def _write(
        self,
        request: web.Request,
        stream: ResumableStream,
        reader: StreamReader,
        changed: asyncio.Event,
    ) -> web.StreamResponse:
        def on_change() -> None:
            changed.set()
            if reader.lost and request.transport is not None:
                # Perhaps it waits for a client that reads nothing. And no orderly end: the client
                # must see that more was to come.
                request.transport.abort()

        reader.on_change = on_change
        response = web.StreamResponse(headers={**EVENT_STREAM_HEADERS, STREAM_ID: stream.name})
        received = False
        try:
            await response.prepare(request)
            request[PROBE] = lambda: write_comment(request)
            await _write_events(response, stream, reader, changed)
            if reader.lost:
                raise ConnectionResetError
            await _end_of_body(request, response)
            received = True
            return response
        except ConnectionResetError:  # the client has left; aiohttp finds that out once more
            return web.StreamResponse(status=CLIENT_CLOSED_REQUEST)
        finally:
            self.streams.detach(stream, reader, self._clock(), received)
            answer = self._answers.get(stream.name)
            if stream.delivered and answer is not None and not answer.is_background:
                self._release_requests(answer)

    def _on_drop(self, name: str) -> None:
        answer = self._answers.pop(name, None)
        task = self._tasks.pop(name, None)
        if task is not None:
            # Not before it has begun: of a task that never began nothing is released.
            asyncio.get_running_loop().call_soon(task.cancel)
        if answer is not None:
            self._release_requests(answer)

    def _release_requests(self, answer: ResumableAnswer) -> None:
        """The pipeline need not keep them any more: the client has them, or they are dropped."""
        request_ids, answer.request_ids = answer.request_ids, []
        self._release(request_ids)

    def _forget(self, name: str, ended: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is ended:  # and not of a second attempt under the name
            del self._tasks[name]

    def _sweep(self) -> None:
        self._suspend_aware_clock.tick(self._read_clock())
        self.streams.expire(self._clock())
        loop = asyncio.get_running_loop()
        more = len(self.streams) > 0 or self._sweeper is None
        self._sweeper = loop.call_later(EXPIRE_INTERVAL, self._sweep) if more else None


def gone(name: str, why: Exception) -> ApiError:
    """The error for a stream that is kept no longer, or not as a whole."""
    return ApiError(410, f"{name}: {why}", code="stream_gone")


async def _run(
    answer: ResumableAnswer,
    session: Session,
    release: Callable[[], None],
    settle: Settle | None,
) -> None:
    try:
        async with session:
            await answer.ended
    except ApiError as error:  # while the calls were made
        answer.fail(error)
    except Exception:
        log.exception("the answer %s failed", answer.stream.name)
        answer.fail(ApiError(500, "internal error"))
    finally:
        release()
    if settle is not None:
        await settle()
    answer.finish()


async def _write_events(
    response: web.StreamResponse,
    stream: ResumableStream,
    reader: StreamReader,
    changed: asyncio.Event,
) -> None:
    """Returns at the stream's end, or when the reader is lost."""
    name = stream.name.encode()
    while not reader.lost:
        changed.clear()
        events = stream.take(reader, WRITE_BYTES)
        if events:
            lines = (b"id: %s/%s\n%s" % (name, number.encode(), event) for number, event in events)
            await response.write(b"".join(lines))  # waits for a client that reads slowly
        elif stream.finished(reader):
            return
        else:
            await changed.wait()


async def _end_of_body(request: web.Request, response: web.StreamResponse) -> None:
    """Ends the body. Returns when the operating system has all of it, so that a client gets it even
    if this process is killed. Raises ConnectionResetError."""
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError
    transport.set_write_buffer_limits(high=0)
    try:
        await response.write_eof()
    finally:
        if not transport.is_closing():
            transport.set_write_buffer_limits()  # the event loop's own


def write_comment(request: web.Request) -> None:
    """Sends a comment, which clients ignore. The host of a client that is gone answers it with a
    reset."""
    transport = request.transport
    if transport is not None and not transport.is_closing():
        chunked = request.version >= HttpVersion11
        size = len(PROBE_COMMENT)
        transport.write(b"%x\r\n%s\r\n" % (size, PROBE_COMMENT) if chunked else PROBE_COMMENT)


FORMAT_VERSION = 1
# Bytes of a format. An answer whose format is larger is kept, but does not outlive its gateway.
MAX_FORMAT_BYTES = 2**20


class ResponsesForm(msgspec.Struct, frozen=True):
    """The format of a stream of /v1/responses.

    Attributes:
    - fields: of the response, that do not change while it grows
    - input: items or text of which the prompt was made
    - given: JSON of the items that the request itself brought, to be stored; empty: nothing is
    - previous: id of the response before it
    """

    fields: JsonObject
    background: bool
    input: str | list[InputItem]
    given: bytes = b""
    previous: str = ""


class MessagesForm(msgspec.Struct, frozen=True):
    """The format of a stream of /v1/messages: see MessagesFormatter."""

    omit_reasoning: bool
    request_id: str


class StreamFormat(msgspec.Struct, frozen=True):
    """How a stream is written.

    Attributes:
    - metadata: without its parser factory, which `parser` makes
    - choices: of all prompts
    - detached: see RetentionPolicy
    - include_usage, continuous_usage: see StreamEncoder
    - responses, messages: of these APIs; without both the stream is OpenAI's
    """

    metadata: ResponseMetadata
    parser: ParserOptions | None
    choices: int
    detached: bool
    include_usage: bool = False
    continuous_usage: bool = False
    responses: ResponsesForm | None = None
    messages: MessagesForm | None = None

    @property
    def partitions(self) -> int:
        """Number of partitions of the stream's events: one for each choice, and one for the events
        behind them; 1 for a single choice."""
        return self.choices + 1 if 1 < self.choices < MAX_PARTITIONS else 1

    def encoded(self) -> bytes:
        """The version, and the rest; empty if it is too large, or if the stream has more choices
        than ids of events can name."""
        if self.choices >= MAX_PARTITIONS:
            return b""
        data = _encoder.encode((FORMAT_VERSION, self))
        return data if len(data) <= MAX_FORMAT_BYTES else b""

    @property
    def tail(self) -> int:
        """Events that come behind all choices."""
        return 1 + self.include_usage


_encoder = msgspec.msgpack.Encoder()
_version = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(StreamFormat)


def decode_format(data: bytes) -> StreamFormat | None:
    """The format; None if another version has written it."""
    try:
        version, rest = _version.decode(data)
        return _decoder.decode(rest) if version == FORMAT_VERSION else None
    except msgspec.DecodeError:
        return None


def stream_format(
    parsed: ParsedRequest,
    metadata: ResponseMetadata,
    policy: RetentionPolicy,
    responses: ResponsesForm | None = None,
    messages: MessagesForm | None = None,
) -> StreamFormat:
    """The format of the stream that answers `parsed`."""
    return StreamFormat(
        metadata=replace(metadata, parser_factory=None),
        parser=parsed.parser_options,
        choices=parsed.choices,
        detached=policy.detached,
        include_usage=parsed.include_usage,
        continuous_usage=parsed.continuous_usage,
        responses=responses,
        messages=messages,
    )


def encoder_for(
    form: StreamFormat, parsers: OutputParsers
) -> tuple[ResponseEncoder, RetainedResponse | None]:
    """The encoder of the stream's events, and what else is retained of a response."""
    factory = parsers.factory_for(form.parser)
    metadata = replace(form.metadata, parser_factory=factory)
    if form.responses is not None:
        formatter = ResponsesFormatter(form.responses.fields, metadata)
        response = RetainedResponse(formatter, form.responses.background, form.responses.input)
        return TranslatedEncoder(metadata, formatter, streams=True), response
    if form.messages is not None:
        messages = MessagesFormatter(
            metadata, form.messages.omit_reasoning, form.messages.request_id
        )
        return TranslatedEncoder(metadata, messages, streams=True), None
    usage = form.include_usage, form.continuous_usage
    return StreamEncoder(metadata, form.choices, *usage), None

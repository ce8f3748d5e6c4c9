"""The two forms of an answer: one JSON body, or server-sent events while it grows.

Both are sinks of a session, in front of an outlet that encodes. A stream writes its chunks to the
connection once in an iteration of the loop: no task, no future and no queue for a token, and one
write for all tokens that came together. Knows no core.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web
from aiohttp.http import HttpVersion11

from pipeinfer.gateway.connections import PROBE
from pipeinfer.gateway.errors import CLIENT_CLOSED_REQUEST, ApiError
from pipeinfer.gateway.events import Failed, OutputDelta, Started
from pipeinfer.gateway.response_encoders import ResponseEncoder

MAX_UNREAD = 8 * 2**20  # bytes that a client may leave unread before it is hung up
EVENT_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def api_error(failed: Failed) -> ApiError:
    """The error for the client, of a Failed of the core."""
    return ApiError(failed.status, failed.message, failed.param, failed.code, failed.retry_after)


class FullResponse:
    """Waits until the answer is complete, then sends one body."""

    def __init__(self, encoder: ResponseEncoder) -> None:
        self._encoder = encoder
        self._content = b""
        # With why it failed. An exception that the future held would hold it in turn, and with it
        # the connection, until a collector comes.
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
        return web.Response(body=self._content, content_type="application/json")


class _StreamResponse(web.StreamResponse):
    """Its head leaves with what is written first, as that of aiohttp's own whole responses."""

    _send_headers_immediately = False


class WriteBatch:
    """The streams that have something to send in this iteration of the loop.

    A write costs more than all else that is done for a token. Where the gateway falls behind, the
    tokens of several steps wait in its inbox; they are read in one iteration, and leave together.
    """

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """It is flushed when all that has come was read."""
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
    _buffered: chunks of this iteration, or from before the headers. _transport: None before the
        headers.
    """

    def __init__(self, encoder: ResponseEncoder, batch: WriteBatch) -> None:
        self._encoder = encoder
        self._batch = batch
        self._buffered: list[bytes] = []  # chunks of this turn, or from before the headers
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
            self._ended.set_result(None)
        if data:
            self._write(data)

    def failed(self, index: int, failed: Failed) -> None:
        if self._ended.done():
            return
        if not self._first_chunk.done():
            self._first_chunk.set_result(failed)
            return
        self._write(self._encoder.error(api_error(failed)))
        self._ended.set_result(None)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Streams until the end; raises ApiError if the request fails before its first chunk."""
        failed = await self._first_chunk
        if failed is not None:
            raise api_error(failed)
        response = _StreamResponse(headers=EVENT_STREAM_HEADERS)
        try:
            await response.prepare(request)
            self._chunked = request.version >= HttpVersion11
            self._transport = request.transport  # what comes from now on goes there by itself
            request[PROBE] = self._write_comment
            await response.write(
                self._take_buffered()
            )  # at once; then perhaps it waits for the client
        except ConnectionResetError:  # the client has left; aiohttp finds that out once more
            return web.StreamResponse(status=CLIENT_CLOSED_REQUEST)
        await self._ended
        with contextlib.suppress(ConnectionResetError):  # the client left during the last chunk
            await response.write_eof(self._take_buffered())
        return response

    def _write_comment(self) -> None:
        """Sends a comment, which clients ignore: a host without such a client answers with a
        reset."""
        if not self._ended.done():
            self._write(b":\n\n")

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

"""The two ways an answer leaves: as one JSON body, or as server-sent events while it grows.

Both are sinks of the port, in front of an outlet that makes the bytes. A stream hands its chunks to
the connection once in a turn of the loop: no task, no future and no queue for a token, and one
write for all tokens that came together. Knows no core.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web
from aiohttp.http import HttpVersion11

from pipeinfer.gateway.connections import PROBE
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Delta, Failed, Started
from pipeinfer.gateway.response_encoders import ResponseEncoder
from pipeinfer.gateway.responses import GONE

BACKLOG = 8 * 2**20  # bytes that a client may leave unread before it is hung up
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def api_error(failed: Failed) -> ApiError:
    """The error of the client for one of the core."""
    return ApiError(failed.status, failed.message, failed.param, failed.code, failed.retry_after)


class WholeAnswer:
    """Waits until all of it is there, then answers once."""

    def __init__(self, outlet: ResponseEncoder) -> None:
        self._outlet = outlet
        self._content = b""
        # With why it failed. An exception that the future held would hold it in turn, and with it
        # the connection, until a collector comes.
        self._done: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        self._outlet.started(index, started)

    def delta(self, index: int, delta: Delta) -> None:
        self._content = self._outlet.delta(index, delta)
        if self._outlet.ended and not self._done.done():
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


class _Streamed(web.StreamResponse):
    """Its head leaves with what is written first, as that of aiohttp's own whole responses."""

    _send_headers_immediately = False


class Turn:
    """The streams that have something to send in this turn of the loop.

    A write costs more than all else that is done for a token. Where the gateway falls behind, the
    tokens of several steps wait in its inbox; they are read in one turn, and leave together.
    """

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """It is flushed when all that has come was read."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._end)
        self._streams.append(stream)

    def _end(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class EventStream:
    """Sends chunks as they come, in each `turn` those that it has. Nothing is sent before the first
    one, so a refusal is an error."""

    def __init__(self, outlet: ResponseEncoder, turn: Turn) -> None:
        self._outlet = outlet
        self._turn = turn
        self._held: list[bytes] = []  # chunks of this turn, or from before the headers
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = True
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[Failed | None] = loop.create_future()  # as WholeAnswer's
        self._ended: asyncio.Future[None] = loop.create_future()

    def started(self, index: int, started: Started) -> None:
        self._outlet.started(index, started)

    def delta(self, index: int, delta: Delta) -> None:
        if self._ended.done():
            return
        data = self._outlet.delta(index, delta)  # hot path: every token of every stream
        if delta.finish is not None and self._outlet.ended:
            self._ended.set_result(None)
        if data:
            self._write(data)

    def failed(self, index: int, failed: Failed) -> None:
        if self._ended.done():
            return
        if not self._begun.done():
            self._begun.set_result(failed)
            return
        self._write(self._outlet.error(api_error(failed)))
        self._ended.set_result(None)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Streams until the end; raises ApiError if the request fails before its first chunk."""
        failed = await self._begun
        if failed is not None:
            raise api_error(failed)
        response = _Streamed(headers=HEADERS)
        try:
            await response.prepare(request)
            self._chunked = request.version >= HttpVersion11
            self._transport = request.transport  # what comes from now on goes there by itself
            request[PROBE] = self._comment
            await response.write(self._taken())  # at once; then perhaps it waits for the client
        except ConnectionResetError:  # the client has left; aiohttp finds that out once more
            return web.StreamResponse(status=GONE)
        await self._ended
        with contextlib.suppress(ConnectionResetError):  # the client left during the last chunk
            await response.write_eof(self._taken())
        return response

    def _comment(self) -> None:
        """A line that says nothing: whoever is gone answers it with a reset."""
        if not self._ended.done():
            self._write(b":\n\n")

    def _write(self, data: bytes) -> None:
        if not self._held:
            if self._transport is not None:
                self._turn.add(self)
            elif not self._begun.done():
                self._begun.set_result(None)
        self._held.append(data)

    def _taken(self) -> bytes:
        """What was held, and is no more."""
        held = self._held
        data = held[0] if len(held) == 1 else b"".join(held)
        held.clear()
        return data

    def flush(self) -> None:
        """Hands what is held to the connection."""
        transport = self._transport
        if not self._held or transport is None:
            return
        data = self._taken()
        if transport.get_write_buffer_size() > BACKLOG:
            transport.abort()  # ends the handler, and with it the request
        elif not transport.is_closing():
            transport.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)

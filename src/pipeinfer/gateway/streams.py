"""The two ways an answer leaves: as one JSON body, or as server-sent events while it grows.

Both are sinks of the port. A stream writes each chunk straight to the connection: no task, no
future and no queue for a token. Knows no core.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web
from aiohttp.http import HttpVersion11

from pipeinfer.gateway.best_of import Best
from pipeinfer.gateway.connections import PROBE
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Delta, Failed, Started
from pipeinfer.gateway.gathered import Gathered, kept
from pipeinfer.gateway.responses import GONE
from pipeinfer.gateway.shapes import DONE, NULL, Answer, Choice, Chunks, Usage, body

BACKLOG = 8 * 2**20  # bytes that a client may leave unread before it is hung up
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def api_error(failed: Failed) -> ApiError:
    """The error of the client for one of the core."""
    return ApiError(failed.status, failed.message, failed.param, failed.code, failed.retry_after)


def _count(usage: Usage, delta: Delta) -> None:
    usage.prompt += delta.prompt_tokens
    usage.output += delta.output_tokens
    usage.cached += delta.cached_tokens


class WholeAnswer:
    """Collects all choices, then answers once. `best` chooses those that are shown."""

    def __init__(self, answer: Answer, choices: int, best: Best | None = None) -> None:
        self._answer = answer
        self._best = best
        self._gathered = [Gathered(answer) for _ in range(choices)]
        self._choices: list[Choice | None] = [None] * choices
        self._open = choices
        self._usage = Usage()
        # With why it failed. An exception that the future held would hold it in turn, and with it
        # the connection, until a collector comes.
        self._done: asyncio.Future[Failed | None] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        self._gathered[index].started(started)

    def delta(self, index: int, delta: Delta) -> None:
        if self._best is not None:
            delta = self._best.take(index, delta)
        delta, gathered = kept(self._answer, delta), self._gathered[index]
        gathered.delta(delta)
        if delta.finish is None:
            return
        self._choices[index] = gathered.whole(delta.finish, delta.stop_reason)
        _count(self._usage, delta)
        self._open -= 1
        if self._open == 0 and not self._done.done():
            self._done.set_result(None)

    def failed(self, index: int, failed: Failed) -> None:
        if not self._done.done():
            self._done.set_result(failed)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Waits for the end; raises ApiError if any choice failed."""
        failed = await self._done
        if failed is not None:
            raise api_error(failed)
        order = range(len(self._choices)) if self._best is None else self._best.chosen()
        choices = [choice for n in order if (choice := self._choices[n]) is not None]
        content = body(self._answer, choices, self._usage)
        return web.Response(body=content, content_type="application/json")


class EventStream:
    """Sends chunks as they come. Nothing is sent before the first one, so a refusal is an error."""

    def __init__(
        self, answer: Answer, choices: int, include_usage: bool, continuous_usage: bool = False
    ) -> None:
        """continuous_usage: each chunk says how much there was so far."""
        self._answer = answer
        self._chunks = Chunks(answer, choices, include_usage, continuous_usage)
        self._gathered = [Gathered(answer) for _ in range(choices)]
        self._include_usage = include_usage
        self._opened = [False] * choices
        self._open = choices
        self._usage = Usage()
        self._held: list[bytes] = []  # chunks from before the headers
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = True
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[Failed | None] = loop.create_future()  # as WholeAnswer's
        self._ended: asyncio.Future[None] = loop.create_future()

    def started(self, index: int, started: Started) -> None:
        self._gathered[index].started(started)
        self._chunks.started(index, started)

    def delta(self, index: int, delta: Delta) -> None:
        if self._ended.done():
            return
        chunks, shown = self._chunks, self._answer.shown  # hot path: every token of every stream
        chunks.count(index, delta)
        opening, logprobs = b"", NULL
        if shown.beside_text:
            delta = kept(self._answer, delta)
            if delta.prompt is not None:
                self._gathered[index].scores(delta)
        beside = delta.logprobs is not None or (shown.token_ids and bool(delta.ids))
        if delta.finish is None and not delta.text and not beside:
            return
        first = not self._opened[index]
        if first:
            self._opened[index] = True
            opening = self._opening(index)
        if delta.logprobs is not None:  # also where the text of its tokens comes later
            self._gathered[index].scores(delta)
            logprobs = self._gathered[index].logprobs()
        if shown.token_ids:
            logprobs = self._gathered[index].with_ids(
                logprobs, delta, first and not self._answer.chat
            )
        if self._answer.reader is not None:
            data = opening + self._read(index, delta, logprobs)
        elif delta.finish is not None:
            choice = Choice(delta.text, delta.finish, delta.stop_reason, logprobs)
            data = opening + chunks.last(index, choice)
        elif beside:
            data = opening + chunks.scored(index, delta.text, logprobs)
        else:
            data = opening + chunks.text(index, delta.text)
        if delta.finish is not None:
            data += self._finish(delta)
        if data:
            self._write(data)

    def failed(self, index: int, failed: Failed) -> None:
        if self._ended.done():
            return
        if not self._begun.done():
            self._begun.set_result(failed)
            return
        self._write(self._chunks.error(api_error(failed)))
        self._ended.set_result(None)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Streams until the end; raises ApiError if the request fails before its first chunk."""
        failed = await self._begun
        if failed is not None:
            raise api_error(failed)
        response = web.StreamResponse(headers=HEADERS)
        try:
            await response.prepare(request)
        except ConnectionResetError:  # the client has left; aiohttp finds that out once more
            return web.StreamResponse(status=GONE)
        self._chunked = request.version >= HttpVersion11
        self._transport = request.transport
        request[PROBE] = self._comment
        held, self._held = self._held, []
        self._write(b"".join(held))
        await self._ended
        with contextlib.suppress(ConnectionResetError):  # the client left during the last chunk
            await response.write_eof()
        return response

    def _comment(self) -> None:
        """A line that says nothing: whoever is gone answers it with a reset."""
        if not self._ended.done():
            self._write(b":\n\n")

    def _opening(self, index: int) -> bytes:
        """What comes before a choice's first text."""
        gathered = self._gathered[index]
        data = self._chunks.opening(index, gathered.prompt_ids)
        if self._answer.shown.echo:
            data += self._chunks.scored(index, gathered.prompt_text, gathered.logprobs())
        return data

    def _read(self, index: int, delta: Delta, logprobs: bytes) -> bytes:
        """The chunks of a choice that is read: one for each piece; log-probs go with the first."""
        chunks, gathered = self._chunks, self._gathered[index]
        made: list[bytes] = []
        for piece in gathered.pieces(delta):
            made.append(chunks.piece(index, piece, logprobs))
            logprobs = NULL
        if delta.finish is not None:
            made.append(chunks.read(index, gathered.end(delta, logprobs)))
        elif logprobs != NULL:
            made.append(chunks.unread(index, logprobs))
        return b"".join(made)

    def _finish(self, delta: Delta) -> bytes:
        """What follows the last chunk of a choice."""
        _count(self._usage, delta)
        self._open -= 1
        if self._open:
            return b""
        self._ended.set_result(None)
        return (self._chunks.usage(self._usage) if self._include_usage else b"") + DONE

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None:
            self._held.append(data)
            if not self._begun.done():
                self._begun.set_result(None)
        elif transport.get_write_buffer_size() > BACKLOG:
            transport.abort()  # ends the handler, and with it the request
        elif not transport.is_closing():
            transport.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)

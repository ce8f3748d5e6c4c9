"""Reads and decodes the bodies of requests, within bounds of size, time and memory.

A large body is decompressed, scanned and decoded in parts, between which the event loop serves
others. Knows the schema, and no core.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from pipeinfer.gateway.connections import CONTINUE
from pipeinfer.gateway.decoding import BodyType, decode, prescanned
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.json_prescan import SLICE_BYTES

READ_TIMEOUT = 30.0  # seconds without a byte after which a client is not waited for
BODY_TIMEOUT = 600.0  # seconds for a whole body: 32 MiB over a line of 0.5 Mbit/s
SMALL_BODY = 64 * 2**10  # bytes of a body that are never refused for what others send
# Bytes beyond that of all bodies that are being read or checked. A body and what is made of it take
# about three times its size for a moment, so the process stays under 1 GiB.
MAX_BUFFERED = 256 * 2**20
DECOMPRESSED_AT_ONCE = (
    256 * 2**10
)  # bytes that are decompressed at a time: well under a millisecond
RETRY_AFTER = 1  # seconds


class BodyReader:
    """Reads bodies of at most `max_bytes` bytes each, after decompression.

    _buffered: bytes beyond SMALL_BODY of all bodies that are being read or decoded now, at most
        _max_buffered.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_buffered = max(MAX_BUFFERED, max_bytes)
        self._buffered = 0  # bytes beyond SMALL_BODY of bodies that are being read

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncGenerator[bytearray]:
        """The whole body; it counts as buffered until the context ends.

        Raises ApiError: 400 if it is broken, 408 if it does not arrive, 413 if it is too large,
        415 for an unknown Content-Encoding, 417 for an unknown Expect, 503 if too much is buffered.
        """
        decoder = _decoder(request)
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        await _send_continue(request)
        body = bytearray()
        try:
            await self._fill(body, decoder, request)
            yield body
        finally:
            self._buffered -= max(0, len(body) - SMALL_BODY)

    async def _fill(
        self, body: bytearray, decoder: _IdentityDecoder | _ZlibDecoder, request: web.Request
    ) -> None:
        try:
            if request.content.is_eof():  # it came with its head, as most do
                await self._take(body, decoder, request.content.read_nowait())
            else:
                async with asyncio.timeout(BODY_TIMEOUT):
                    while data := await self._next(request):
                        await self._take(body, decoder, data)
            decoder.end()
        except zlib.error:
            raise _broken_body("it cannot be decompressed") from None
        except (RequestPayloadError, HttpProcessingError):
            raise _broken_body("it ends early, or its chunks are malformed") from None
        except TimeoutError:
            message = f"the body did not come within {READ_TIMEOUT:g} s without a byte"
            raise ApiError(408, message, code="body_timeout") from None

    async def _take(
        self, body: bytearray, decoder: _IdentityDecoder | _ZlibDecoder, data: bytes
    ) -> None:
        for part in decoder.parts(data) if data else ():
            self._add(body, part)
            if len(part) == DECOMPRESSED_AT_ONCE:
                await asyncio.sleep(0)  # there is more to decompress; others first

    async def _next(self, request: web.Request) -> bytes:
        async with asyncio.timeout(READ_TIMEOUT):
            return await request.content.readany()

    def _add(self, body: bytearray, part: bytes) -> None:
        if len(body) + len(part) > self._max_bytes:
            raise self._too_large()
        before = max(0, len(body) - SMALL_BODY)
        body += part
        self._buffered += max(0, len(body) - SMALL_BODY) - before
        if self._buffered > self._max_buffered:
            message = "too many large bodies are being read"
            raise ApiError(503, message, code="overloaded", retry_after=RETRY_AFTER)

    def _too_large(self) -> ApiError:
        message = f"the body is too large: more than {self._max_bytes} bytes"
        return ApiError(413, message, code="body_too_large")


async def _send_continue(request: web.Request) -> None:
    """Asks for the body of a client that waits for 100 Continue."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        message = "the only Expect that is known is 100-continue"
        raise ApiError(417, message, code="unknown_expectation")
    await request.writer.write(CONTINUE)
    request.writer.output_size = 0  # the answer proper has not begun


def _broken_body(why: str) -> ApiError:
    return ApiError(400, f"the body is broken: {why}", code="invalid_body")


class _IdentityDecoder:
    """Passes a body on that is not compressed."""

    def parts(self, data: bytes) -> tuple[bytes]:
        return (data,)

    def end(self) -> None:
        """No end is marked, so every body is whole."""


class _ZlibDecoder:
    """Decompresses gzip or deflate, the latter with or without zlib's header."""

    def __init__(self, encoding: str) -> None:
        self._gzip = encoding != "deflate"
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS) if self._gzip else None

    def parts(self, data: bytes) -> Iterator[bytes]:
        """What `data` decompresses to, at most DECOMPRESSED_AT_ONCE bytes at a time.

        Raises zlib.error if it is broken.
        """
        if self._stream is None:
            bare = data[0] & 0x0F != 8
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS)
        full = False
        while data or full:
            if self._stream.eof and data:
                raise zlib.error("more after its end")
            part = self._stream.decompress(data, DECOMPRESSED_AT_ONCE)
            yield part
            full = len(part) == DECOMPRESSED_AT_ONCE
            data = self._stream.unconsumed_tail or self._stream.unused_data

    def end(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise zlib.error("it ends early")


def _decoder(request: web.Request) -> _IdentityDecoder | _ZlibDecoder:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return _IdentityDecoder()
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _ZlibDecoder(encoding)
    message = "the body's Content-Encoding is not supported; gzip and deflate are"
    raise ApiError(415, message, code="unsupported_encoding")


# Bytes of a body that is decoded at once: 5 ms in the worst case. Larger ones take turns by parts.
DECODED_AT_ONCE = SLICE_BYTES
_DONE = object()


class BodyDecoder:
    """Reads, scans and decodes bodies; all handlers share one.

    Bodies of up to DECODED_AT_ONCE bytes are decoded at once. Larger ones take turns, oldest waiter
    first: one part of one body in each iteration of the event loop.

    on_unknown_fields: called with names of fields that the schema does not have.
    """

    def __init__(
        self, bodies: BodyReader, on_unknown_fields: Callable[[Sequence[str]], object]
    ) -> None:
        self._bodies = bodies
        self._on_unknown_fields = on_unknown_fields
        self._lock = asyncio.Lock()  # whoever waits longest is next

    async def read(self, request: web.Request, kind: type[BodyType]) -> BodyType:
        """The decoded body. Raises ApiError 400 if the schema refuses it, and as
        BodyReader.read."""
        async with self._bodies.read(request) as body:
            if len(body) <= DECODED_AT_ONCE:
                raw = bytes(body)
                for _ in prescanned(raw, kind):
                    continue
                return decode(raw, kind, self._on_unknown_fields)
            # In one iteration of the loop there is one part of one of them.
            parts, more = prescanned(body, kind), True
            while more:
                async with self._lock:
                    more = next(parts, _DONE) is not _DONE
                    await asyncio.sleep(0)
            async with self._lock:
                decoded = decode(bytes(body), kind, self._on_unknown_fields)
                await asyncio.sleep(0)
                return decoded

"""From a connection to a decoded request: reads bodies, and lets no large one hold up the others.

All handlers share one intake. It bounds the memory of what is being read, and gives the loop's
other work a turn between any two parts that take long. Knows no core.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import Request, decode, surveyed
from pipeinfer.gateway.survey import SLICE

# Bodies up to this are read and decoded at once: 5 ms in the worst case. Larger ones queue up.
SMALL = SLICE
# Of the larger bodies that are being read or checked, together. A body and what is made of it take
# about three times its size for a moment, so the process stays under 1 GiB.
MOST_BYTES = 256 * 2**20
RETRY = 1  # seconds


class Intake:
    """`most_bytes`: of larger bodies under way, over all connections."""

    def __init__(self, largest: int, most_bytes: int = MOST_BYTES) -> None:
        self._largest = largest  # bytes of one body
        self._most_bytes = max(most_bytes, largest)
        self._held = 0
        self._one_large = asyncio.Lock()

    async def take(self, request: web.Request, kind: type[Request]) -> Request:
        """The body of `request`, checked.

        ApiError 400 for a wrong one, 429 if too many large ones are under way;
        HTTPRequestEntityTooLarge.
        """
        with contextlib.ExitStack() as held:
            raw = await self._read(request, held)
            if len(raw) <= SMALL:
                return _decoded(raw, kind)
            async with self._one_large:  # in one turn of the loop, one of them is decoded
                for _ in surveyed(raw, kind):
                    await asyncio.sleep(0)
                body = decode(raw, kind)
                await asyncio.sleep(0)
                return body

    async def _read(self, request: web.Request, held: contextlib.ExitStack) -> bytes:
        """All bytes; those of a large body are counted until `held` is closed."""
        parts: list[bytes] = []
        size = request.content_length or 0
        if size > self._largest:
            raise web.HTTPRequestEntityTooLarge(max_size=self._largest, actual_size=size)
        size = 0
        while part := await request.content.readany():
            parts.append(part)
            size += len(part)
            if size > self._largest:
                raise web.HTTPRequestEntityTooLarge(max_size=self._largest, actual_size=size)
            if size > SMALL:
                self._count(size if size - len(part) <= SMALL else len(part), held)
        return b"".join(parts)

    def _count(self, size: int, held: contextlib.ExitStack) -> None:
        if self._held + size > self._most_bytes:
            message = "too many large bodies are being read"
            raise ApiError(429, message, code="queue_full", retry_after=RETRY)
        self._held += size
        held.callback(self._release, size)

    def _release(self, size: int) -> None:
        self._held -= size


def _decoded(raw: bytes, kind: type[Request]) -> Request:
    for _ in surveyed(raw, kind):
        continue
    return decode(raw, kind)

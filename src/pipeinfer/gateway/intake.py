"""From a body to a decoded request, so that no large one holds up the others.

All handlers share one intake, which lets the loop's other work run between any two parts that
take long. Knows no core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from pipeinfer.gateway.bodies import BodyReader
from pipeinfer.gateway.schema import Request, decode, surveyed
from pipeinfer.gateway.survey import SLICE

# Bodies up to this are decoded at once: 5 ms in the worst case. Larger ones take turns by parts.
DECODED_AT_ONCE = SLICE
_DONE = object()


class BodyDecoder:
    """Checks and decodes what `bodies` reads. strange: see schema.decode."""

    def __init__(self, bodies: BodyReader, strange: Callable[[Sequence[str]], object]) -> None:
        self._bodies = bodies
        self._on_unknown_fields = strange
        self._turn = asyncio.Lock()  # whoever waits longest is next

    async def read(self, request: web.Request, kind: type[Request]) -> Request:
        """The body of `request`, checked. ApiError 400 for a wrong one, and as Bodies.reading."""
        async with self._bodies.read(request) as body:
            if len(body) <= DECODED_AT_ONCE:
                raw = bytes(body)
                for _ in surveyed(raw, kind):
                    continue
                return decode(raw, kind, self._on_unknown_fields)
            # In one iteration of the loop there is one part of one of them.
            parts, more = surveyed(body, kind), True
            while more:
                async with self._turn:
                    more = next(parts, _DONE) is not _DONE
                    await asyncio.sleep(0)
            async with self._turn:
                decoded = decode(bytes(body), kind, self._on_unknown_fields)
                await asyncio.sleep(0)
                return decoded

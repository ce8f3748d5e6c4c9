"""From a body to a decoded request, so that no large one holds up the others.

All handlers share one intake, which lets the loop's other work run between any two parts that
take long. Knows no core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from pipeinfer.gateway.bodies import Bodies
from pipeinfer.gateway.decoding import BodyType, decode, prescanned
from pipeinfer.gateway.json_prescan import SLICE_BYTES

# Bodies up to this are decoded at once: 5 ms in the worst case. Larger ones take turns by parts.
SMALL = SLICE_BYTES
END = object()


class Intake:
    """Checks and decodes what `bodies` reads. strange: see schema.decode."""

    def __init__(self, bodies: Bodies, strange: Callable[[Sequence[str]], object]) -> None:
        self._bodies = bodies
        self._strange = strange
        self._turn = asyncio.Lock()  # whoever waits longest is next

    async def take(self, request: web.Request, kind: type[BodyType]) -> BodyType:
        """The body of `request`, checked. ApiError 400 for a wrong one, and as Bodies.reading."""
        async with self._bodies.reading(request) as body:
            if len(body) <= SMALL:
                raw = bytes(body)
                for _ in prescanned(raw, kind):
                    continue
                return decode(raw, kind, self._strange)
            # In one iteration of the loop there is one part of one of them.
            parts, more = prescanned(body, kind), True
            while more:
                async with self._turn:
                    more = next(parts, END) is not END
                    await asyncio.sleep(0)
            async with self._turn:
                decoded = decode(bytes(body), kind, self._strange)
                await asyncio.sleep(0)
                return decoded

"""From a body to a decoded request, so that no large one holds up the others.

All handlers share one intake, which lets the loop's other work run between any two parts that
take long. Knows no core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from pipeinfer.gateway.bodies import Bodies
from pipeinfer.gateway.schema import Request, decode, surveyed
from pipeinfer.gateway.survey import SLICE

# Bodies up to this are decoded at once: 5 ms in the worst case. Larger ones queue up.
SMALL = SLICE


class Intake:
    """Checks and decodes what `bodies` reads. strange: see schema.decode."""

    def __init__(self, bodies: Bodies, strange: Callable[[Sequence[str]], object]) -> None:
        self._bodies = bodies
        self._strange = strange
        self._one_large = asyncio.Lock()

    async def take(self, request: web.Request, kind: type[Request]) -> Request:
        """The body of `request`, checked. ApiError 400 for a wrong one, and as Bodies.reading."""
        async with self._bodies.reading(request) as body:
            if len(body) <= SMALL:
                raw = bytes(body)
                for _ in surveyed(raw, kind):
                    continue
                return decode(raw, kind, self._strange)
            async with self._one_large:  # in one iteration of the loop, one of them is decoded
                raw = bytes(body)
                for _ in surveyed(raw, kind):
                    await asyncio.sleep(0)
                decoded = decode(raw, kind, self._strange)
                await asyncio.sleep(0)
                return decoded

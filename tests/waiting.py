"""Waiting for something to become true on the running loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(
    condition: Callable[[], object], patience: float = 60.0, every: float = 0.005
) -> None:
    """Looks each `every` seconds; raises TimeoutError after `patience`."""
    async with asyncio.timeout(patience):
        while not condition():
            await asyncio.sleep(every)

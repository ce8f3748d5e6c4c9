"""The tokenizer's I/O beside the bus: long prompts to their lanes, grammars to their trials.

Knows which is which, and nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.messages import Message
from pipeinfer.tokenizer.events import Encode, Try
from pipeinfer.tokenizer.lanes import Lanes
from pipeinfer.tokenizer.trials import Trials


class TokenizerDriver:
    """See runtime/stage.py."""

    def __init__(self, lanes: Lanes, trials: Trials) -> None:
        self._lanes = lanes
        self._trials = trials

    async def start(self, feed: Callable[[Message], None]) -> None:
        """See Driver, here and below."""
        await self._lanes.start(feed)
        await self._trials.start(feed)

    def deliver(self, message: Message) -> None:
        match message:
            case Encode():
                self._lanes.deliver(message)
            case Try():
                self._trials.deliver(message)
            case _:
                raise TypeError(f"a tokenizer's driver takes no {type(message).__name__}")

    async def stop(self) -> None:
        await self._lanes.stop()
        await self._trials.stop()

    def stats(self) -> dict[str, float]:
        return self._trials.stats()

"""What the tokenizer's core has done elsewhere: long prompts encoded, grammars tried.

Hands each of the core's local outputs to whoever does it. Knows neither how that is done nor where.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeinfer.messages import Message
from pipeinfer.tokenizer.events import Encode, Try
from pipeinfer.tokenizer.lanes import Lanes
from pipeinfer.tokenizer.trials import Trials


class TokenizerDriver:
    """The tokenizer's driver."""

    def __init__(self, lanes: Lanes, trials: Trials) -> None:
        self._lanes = lanes
        self._trials = trials

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Processes start when they are first needed."""
        await self._lanes.start(feed)
        await self._trials.start(feed)

    def deliver(self, message: Message) -> None:
        """Takes the core's local outputs."""
        match message:
            case Try():
                self._trials.deliver(message)
            case Encode():
                self._lanes.deliver(message)
            case _:
                raise TypeError(f"a tokenizer has no {type(message).__name__} done elsewhere")

    async def stop(self) -> None:
        """Ends all processes; what they were at is dropped."""
        await self._lanes.stop()
        await self._trials.stop()

    def stats(self) -> dict[str, float]:
        """The core counts what is under way."""
        return {"trials_ended_total": self._trials.ended}

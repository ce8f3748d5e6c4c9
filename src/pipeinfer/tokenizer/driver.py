"""The tokenizer's I/O beside the bus: long prompts to their lanes, grammars to their trials.

Knows which is which, and nothing of either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeinfer.messages import Message
from pipeinfer.tokenizer.events import Encode, EncodeNext, Try
from pipeinfer.tokenizer.lanes import EncodingQueues
from pipeinfer.tokenizer.trials import GrammarValidation


class TokenizerDriver:
    """See runtime/stage.py."""

    def __init__(self, lanes: EncodingQueues, trials: GrammarValidation) -> None:
        self._encoding = lanes
        self._validation = trials
        self._feed: Callable[[Message], None] | None = None
        self._turns = 0  # EncodeNext that the core has not got back

    async def start(self, feed: Callable[[Message], None]) -> None:
        """See Driver, here and below."""
        self._feed = feed
        await self._encoding.start(feed)
        await self._validation.start(feed)

    def deliver(self, message: Message) -> None:
        match message:
            case Encode():
                self._encoding.deliver(message)
            case EncodeNext():
                self._turns += 1
                if self._turns == 1:
                    asyncio.get_running_loop().call_soon(self._encode_next)
            case Try():
                self._validation.deliver(message)
            case _:
                raise TypeError(f"a tokenizer's driver takes no {type(message).__name__}")

    def _encode_next(self) -> None:
        """In a turn of the loop of its own: sockets are read before the next one."""
        if self._feed is None:
            return
        self._turns -= 1
        if self._turns:
            asyncio.get_running_loop().call_soon(self._encode_next)
        self._feed(EncodeNext())

    async def stop(self) -> None:
        self._feed = None
        await self._encoding.stop()
        await self._validation.stop()

    def stats(self) -> dict[str, float]:
        return self._validation.stats()

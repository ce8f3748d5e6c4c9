"""Questions to all groups to forget their cached prefixes, and who has answered them.

For the HTTP side and the offline classes. It is used on one event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable

from pipeinfer.gateway.health import StageStatus
from pipeinfer.messages import CacheReset, Message, ResetCache

RESET_TIMEOUT = (
    10.0  # seconds; a group that is started again takes longer, and then has nothing cached
)


class _Reset:
    __slots__ = ("done", "pending")

    def __init__(self, missing: set[int]) -> None:
        self.pending = missing
        self.done = asyncio.Event()


class CacheResets:
    """Those that wait for answers, by the name of each."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Reset] = {}

    async def reset(
        self, feed: Callable[[Message], None], stages: Iterable[StageStatus]
    ) -> set[int]:
        """Asks all groups of `stages` to forget cached prefixes that no request uses; returns those
        that have not said so in time."""
        name = f"reset-{uuid.uuid4().hex}"
        groups = {row.group for row in stages if row.name == "scheduler"}
        reset = self._waiting[name] = _Reset(groups)
        try:
            feed(ResetCache(name))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reset.done.wait(), RESET_TIMEOUT)
        finally:
            del self._waiting[name]
        return reset.pending

    def on_answer(self, answer: CacheReset) -> None:
        """A group's answer; one to an unknown question is fine."""
        reset = self._waiting.get(answer.name)
        if reset is not None:
            reset.pending.discard(answer.group)
            if not reset.pending:
                reset.done.set()

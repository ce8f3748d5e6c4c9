"""Tries grammars in processes of their own while the stage goes on.

One that takes long holds one of a few processes up, which is ended when its time is over. Knows no
routing, no prompt and no recording.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeinfer.grammars.trial import SECONDS, Setup, Trial
from pipeinfer.messages import Message, Submit
from pipeinfer.tokenizer.errands import Errands, Find
from pipeinfer.tokenizer.events import Tried, Try

PROCESSES = 3  # the second starts when the first is busy


class Trier:
    """A worker, see errands.py. `process`: the one that it asks."""

    def __init__(self, setup: Setup, seconds: float) -> None:
        self.process = Trial(setup, seconds)
        self.close = self.process.close
        self.kill = self.process.kill

    def work(self, submit: Submit) -> Tried:
        """The verdict, or why there is none."""
        name, attempt = submit.request_id, submit.attempt
        spec = submit.params.structured_outputs
        assert spec is not None
        try:
            message = self.process.verdict(spec)
        except (RuntimeError, OSError) as error:
            return Tried(name, attempt, 500, f"the grammar was not tried: {error}")
        return Tried(name, attempt, 400 if message else 0, message)


class Trials:
    """A part of the tokenizer's driver. `find`: see Errands. `setup`: the model's vocabulary; None
    if it has none for grammars, because of `none`."""

    def __init__(
        self, setup: Setup | None, find: Find, none: str = "", seconds: float = SECONDS
    ) -> None:
        self._none = none
        self._triers: list[Trier] = []
        self._errands = Errands(PROCESSES, lambda: self._trier(setup, seconds), find)
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Processes start with the first grammar."""
        self._feed = feed
        self._errands.start(feed)

    def deliver(self, message: Try) -> None:
        """One more."""
        if self._none:
            said = Tried(message.request_id, message.attempt, 400, self._none)
            asyncio.get_running_loop().call_soon(self._tell, said)
            return
        self._errands.add(message)

    async def stop(self) -> None:
        """Ends the processes; what they were at is dropped."""
        self._feed = None
        await self._errands.stop()

    def stats(self) -> dict[str, float]:
        """Processes that grammars have cost."""
        return {"trials_ended_total": sum(trier.process.ended for trier in self._triers)}

    def _trier(self, setup: Setup | None, seconds: float) -> Trier:
        assert setup is not None
        self._triers.append(Trier(setup, seconds))
        return self._triers[-1]

    def _tell(self, said: Tried) -> None:
        if self._feed is not None:
            self._feed(said)

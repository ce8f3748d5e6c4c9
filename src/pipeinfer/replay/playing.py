"""The two ways to play a recording: a core alone, or an engine's core with its real device.

On the device the plans' steps are computed again; the end of a step is fed where the recording has
it, once the device has reported it too and said the same tokens. Knows no file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from pipeinfer.engine.core import Compute, StepFailed
from pipeinfer.events import GraphDue, StepDone
from pipeinfer.messages import Message
from pipeinfer.replay.comparison import first_mismatch
from pipeinfer.replay.difference import Difference
from pipeinfer.replay.pacing import Pace
from pipeinfer.replay.player import Player
from pipeinfer.replay.recording import Exchange
from pipeinfer.replay.tally import Tally
from pipeinfer.replay.varying import left_out
from pipeinfer.runtime.stage import Driver

STEP_SECONDS = 600.0  # a device that is silent for so long has hung


class DeviceHung(RuntimeError):
    """The device did not report a step."""


def play_alone(player: Player, exchanges: Iterable[Exchange], pace: Pace, tally: Tally) -> None:
    """Core only: everything comes from the recording."""
    for exchange in exchanges:
        if (seconds := pace.wait(exchange.input.time)) > 0:
            time.sleep(seconds)
        tally.add(player.feed(exchange))
        if tally.over or player.reached(exchange):
            return


class DevicePlayback:
    """Plays an engine with its driver. `player` must have been given `deliver` of this object."""

    def __init__(self, driver: Driver, tally: Tally) -> None:
        self._driver, self._tally = driver, tally
        self._reports: asyncio.Queue[Message] = asyncio.Queue()
        self._submitted: set[tuple[int, int]] = set()
        self.steps = 0

    def deliver(self, message: Message) -> None:
        """A step for the device, or a graph to capture."""
        if isinstance(message, Compute):
            self._submitted.add((message.step.epoch, message.step.number))
        self._driver.deliver(message)

    def _hear(self, message: Message) -> None:
        """When graphs are captured is recorded, too."""
        if not isinstance(message, GraphDue):
            self._reports.put_nowait(message)

    async def play(self, player: Player, exchanges: Iterable[Exchange], pace: Pace) -> None:
        """Raises what the core raises, and DeviceHung."""
        await self._driver.start(self._hear)
        try:
            for exchange in exchanges:
                if (seconds := pace.wait(exchange.input.time)) > 0:
                    await asyncio.sleep(seconds)
                self._tally.follow(exchange)
                difference = await self._await_device(exchange)
                self._tally.add(difference)
                if not self._tally.over:
                    self._tally.add(player.feed(exchange))
                if self._tally.over or player.reached(exchange):
                    return
        finally:
            await self._driver.stop()

    async def _await_device(self, exchange: Exchange) -> Difference | None:
        """For the end of a step that the device has as well: what it says, against the record."""
        entry = exchange.input
        if not isinstance(entry.message, (StepDone, StepFailed)):
            return None
        step = (entry.message.epoch, entry.message.number)
        if step not in self._submitted:
            return None  # of an epoch that began before the recording
        self._submitted.remove(step)
        try:
            report = await asyncio.wait_for(self._reports.get(), STEP_SECONDS)
        except TimeoutError:
            raise DeviceHung(f"no report of step {step[1]} in {STEP_SECONDS:g} s") from None
        self.steps += 1
        if isinstance(report, StepFailed) and isinstance(entry.message, StepFailed):
            return None  # the reason's text may hold addresses; the core raises in a moment
        if isinstance(report, StepDone) and isinstance(entry.message, StepDone):
            self._tally.step(exchange, report)
        mismatch = first_mismatch(entry.message, report, left_out)
        if mismatch is None:
            return None
        return Difference(entry.seq, entry.channel, *mismatch, entry)

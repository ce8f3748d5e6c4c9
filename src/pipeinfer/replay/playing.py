"""Plays the exchanges of a trace into a core: how fast, beside which device, and what differed.

A device that rounds differently goes its own way from the first near tie on, for that request
alone: so how many requests are concerned says more than how many tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pipeinfer.core import LOCAL, Core, GraphDue, Send, StepDone
from pipeinfer.engine.core import Compute, StepFailed
from pipeinfer.messages import Message, Result
from pipeinfer.replay.compare import (
    Difference,
    Skips,
    first_difference,
    first_mismatch,
    ignored_fields,
)
from pipeinfer.replay.rebuild import Subjects
from pipeinfer.replay.recording import TraceEntry, TraceExchange
from pipeinfer.runtime.stage import Driver
from pipeinfer.wire import unpack


class ReplayCounts:
    """`keep_going`: `over` stays false. first: the first difference. tokens, wrong: ids that a
    device sampled, and those that were not the recorded ones. requests: of which those were."""

    def __init__(self, keep_going: bool = False) -> None:
        self._keep_going = keep_going
        self._subjects = Subjects()
        self._seen: set[str] = set()
        self.first: Difference | None = None
        self.messages: Counter[str] = Counter()
        self.tokens = self.wrong = 0
        self.requests: set[str] = set()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to find out."""
        return self.first is not None and not self._keep_going

    def add(self, difference: Difference | None) -> None:
        """What one input brought."""
        if difference is not None:
            self.first = self.first or difference
            self.messages[difference.cause.kind] += 1

    def follow(self, exchange: TraceExchange) -> None:
        """Every exchange that is played, in order: who sits in which slot."""
        if exchange.input.channel == "plan":
            self._seen.update(self._subjects.of(exchange.input.message))

    def step(self, exchange: TraceExchange, report: StepDone) -> None:
        """A step of the device, and the exchange that has what was recorded of it."""
        recorded: StepDone = exchange.input.message
        one, other = unpack(recorded.token_ids), unpack(report.token_ids)
        self.tokens += len(one)
        if len(one) != len(other):
            self.wrong += max(len(one), len(other))
            return
        wrong = np.flatnonzero(one != other)
        self.wrong += len(wrong)
        result = next((o.message for o in exchange.outputs if isinstance(o.message, Result)), None)
        if not len(wrong) or result is None:
            return
        slots = np.repeat(unpack(result.slots), unpack(result.produced))
        names = self._subjects.rows(recorded.epoch, recorded.number)
        self.requests |= {names[s] for s in slots[wrong[wrong < len(slots)]].tolist()}

    def summary_lines(self) -> list[str]:
        """The sums, for people."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.messages.most_common())
        lines = [f"inputs with a difference: {counts or 'none'}"]
        if self.tokens:
            lines.append(
                f"tokens: {self.wrong} of {self.tokens} differ, in {len(self.requests)} of "
                f"{len(self._seen)} requests"
            )
        return lines


class ReplayPace:
    """`wait(t)` returns seconds to wait before what was recorded at `t` is due; 0 if not in real
    time, or late."""

    def __init__(
        self, realtime: bool, first: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._realtime, self._first, self._clock = realtime, first, clock
        self._begun = clock()

    def wait(self, recorded: float) -> float:
        if not self._realtime:
            return 0.0
        return max(0.0, recorded - self._first - (self._clock() - self._begun))


Deliver = Callable[[Any], None]
DEVICE = ("Compute", "Capture")  # what a device does whose steps are played


class CorePlayer:
    """Plays exchanges on `core`. `until`: the sequence number to stop before; `halt(core, entry)`
    is called there, once. `deliver` gets what the core sends to its device.

    current: the exchange that is being played, also after its input raised.
    """

    def __init__(
        self,
        core: Core,
        skips: Skips,
        deliver: Deliver | None = None,
        until: int | None = None,
        halt: Callable[[Core, TraceEntry], None] | None = None,
    ) -> None:
        self._core, self._skips, self._deliver = core, skips, deliver
        self._until, self._halt = until, halt
        self.current: TraceExchange | None = None
        self.inputs = self.outputs = 0

    def reached(self, exchange: TraceExchange) -> bool:
        """True from the exchange on that holds message `until`."""
        return self._until is not None and exchange.last_seq >= self._until

    def feed(self, exchange: TraceExchange) -> Difference | None:
        """Plays one exchange; raises what the core raises."""
        self.current = exchange
        entry = exchange.input
        if self._halt is not None and self.reached(exchange):
            halt, self._halt = self._halt, None
            halt(self._core, entry)
        sends = self._core.handle(entry.message, entry.time)
        self.inputs += 1
        kept = [send for send in sends if not self._for_the_device(send)]
        self.outputs += len(kept)
        return first_difference(exchange, kept, self._skips, tail=exchange.is_last)

    def _for_the_device(self, send: Send) -> bool:
        """Whoever computes gets it. Arrays for a device are not in the recording."""
        kind = type(send.message).__name__
        if send.channel != LOCAL or kind not in DEVICE:
            return False
        if self._deliver is not None:
            self._deliver(send.message)
        return kind == "Compute"


STEP_SECONDS = 600.0  # a device that is silent for so long has hung


class DeviceHung(RuntimeError):
    """The device did not report a step."""


def play_core(
    player: CorePlayer, exchanges: Iterable[TraceExchange], pace: ReplayPace, counts: ReplayCounts
) -> None:
    """Core only: everything comes from the recording."""
    for exchange in exchanges:
        if (seconds := pace.wait(exchange.input.time)) > 0:
            time.sleep(seconds)
        counts.add(player.feed(exchange))
        if counts.over or player.reached(exchange):
            return


class DevicePlayback:
    """Plays an engine with its driver. `player` must have been given `deliver` of this object."""

    def __init__(self, driver: Driver, counts: ReplayCounts) -> None:
        self._driver, self._counts = driver, counts
        self._reports: asyncio.Queue[Message] = asyncio.Queue()
        self._submitted: set[tuple[int, int]] = set()
        self.steps = 0

    def deliver(self, message: Message) -> None:
        """A step for the device, or a graph to capture."""
        if isinstance(message, Compute):
            self._submitted.add((message.step.epoch, message.step.number))
        self._driver.deliver(message)

    def _on_event(self, message: Message) -> None:
        """When graphs are captured is recorded, too."""
        if not isinstance(message, GraphDue):
            self._reports.put_nowait(message)

    async def play(
        self, player: CorePlayer, exchanges: Iterable[TraceExchange], pace: ReplayPace
    ) -> None:
        """Raises what the core raises, and DeviceHung."""
        await self._driver.start(self._on_event)
        try:
            for exchange in exchanges:
                if (seconds := pace.wait(exchange.input.time)) > 0:
                    await asyncio.sleep(seconds)
                self._counts.follow(exchange)
                difference = await self._await_device(exchange)
                self._counts.add(difference)
                if not self._counts.over:
                    self._counts.add(player.feed(exchange))
                if self._counts.over or player.reached(exchange):
                    return
        finally:
            await self._driver.stop()

    async def _await_device(self, exchange: TraceExchange) -> Difference | None:
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
            self._counts.step(exchange, report)
        mismatch = first_mismatch(entry.message, report, ignored_fields)
        if mismatch is None:
            return None
        return Difference(entry.seq, entry.channel, *mismatch, entry)

"""Counts what differs, where a replay goes on after the first difference; tokens above all.

A device that rounds differently goes its own way from the first near tie on, for that request
alone: so how many requests are concerned says more than how many tokens. Knows plans and results.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pipeinfer.events import StepDone
from pipeinfer.messages import Result
from pipeinfer.packing import unpack
from pipeinfer.replay.difference import Difference
from pipeinfer.replay.recording import Exchange
from pipeinfer.replay.subjects import Subjects


class Tally:
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

    def follow(self, exchange: Exchange) -> None:
        """Every exchange that is played, in order: who sits in which slot."""
        if exchange.input.channel == "plan":
            self._seen.update(self._subjects.of(exchange.input.message))

    def step(self, exchange: Exchange, report: StepDone) -> None:
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

    def lines(self) -> list[str]:
        """The sums, for people."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.messages.most_common())
        lines = [f"inputs with a difference: {counts or 'none'}"]
        if self.tokens:
            lines.append(
                f"tokens: {self.wrong} of {self.tokens} differ, in {len(self.requests)} of "
                f"{len(self._seen)} requests"
            )
        return lines

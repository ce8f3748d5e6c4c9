"""The device of one group in virtual time: steps run one after the other, each as long as modelled.

Knows no plan and no request.
"""

from __future__ import annotations

import random

from simulate.noise import Draws
from simulate.step_model import StepModel

GROUPS = 1 << 20  # seeds of one run: more than it can have groups


class Device:
    """`free_at`: when the last step that was given to it ends, in virtual seconds; `seen_at`: when
    clients have its tokens. The same `seed` scatters the same steps alike."""

    def __init__(self, model: StepModel, seed: int = 0) -> None:
        self._seconds = model.seconds
        self._turnaround, self._bubble = model.turnaround or (0.0,), model.bubble or (0.0,)
        self._outbound, self._outbound_row = model.outbound or (0.0,), model.outbound_row
        source = random.Random(seed)
        self._random, self._factor = source.random, Draws(model.noise, source).factor
        self.free_at = self.seen_at = 0.0
        self.busy = 0.0  # seconds in steps

    def run(self, now: float, decodes: int, contexts: int, tokens: int, pairs: int) -> float:
        """When a step that is planned `now` ends. Of one without rows: when those before end."""
        if not decodes and not tokens:
            return max(self.free_at, now)
        seconds = self._seconds(decodes, contexts, tokens, pairs)
        seconds *= self._factor(seconds, tokens > 0)
        self.busy += seconds
        chance, outbound = self._random, self._outbound
        waits = self._turnaround if self.free_at <= now else self._bubble
        begin = max(self.free_at, now) + waits[int(chance() * len(waits))]
        self.free_at = begin + seconds
        delay = outbound[int(chance() * len(outbound))] + self._outbound_row * decodes
        # What was sent before arrives before.
        self.seen_at = max(self.seen_at, self.free_at + delay)
        return self.free_at

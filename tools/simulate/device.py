"""The device of one group in virtual time: steps run one after the other, each as long as modelled.

Knows no plan and no request.
"""

from __future__ import annotations

import random

from simulate.step_model import StepModel


class Device:
    """`free_at`: when the last step that was given to it ends, in virtual seconds. The same `seed`
    gives the same steps the same jitter."""

    def __init__(self, model: StepModel, seed: int = 0) -> None:
        self._seconds, self._turnaround = model.seconds, model.turnaround
        self._jitter = model.jitter
        self._random = random.Random(seed).random
        self.free_at = 0.0
        self.busy = 0.0  # seconds in steps

    def run(self, now: float, decodes: int, contexts: int, tokens: int, pairs: int) -> float:
        """When a step that is planned `now` ends. Of one without rows: when those before end."""
        if not decodes and not tokens:
            return max(self.free_at, now)
        seconds = self._seconds(decodes, contexts, tokens, pairs)
        if self._jitter:
            seconds *= self._jitter[int(self._random() * len(self._jitter))]
        self.busy += seconds
        self.free_at = max(self.free_at, now + self._turnaround) + seconds
        return self.free_at

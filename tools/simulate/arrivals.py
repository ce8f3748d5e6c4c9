"""A request on its way into a simulation.

Knows nothing else; workloads.py makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Request `number` comes `at` (virtual seconds) with `prompt` int32 [n]; it wants exactly
    `output` tokens. Its sampled ids are all `sampled_id`, which no prompt has."""

    number: int
    at: float
    prompt: np.ndarray
    output: int

    @property
    def id(self) -> str:
        return f"r{self.number}"

    @property
    def sampled_id(self) -> int:
        return OUTPUT_IDS + self.number


OUTPUT_IDS = 1 << 30  # prompts use ids below

"""A request on its way into a simulation.

Knows nothing else; workloads.py makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeinfer.messages import Work
from pipeinfer.packing import pack
from pipeinfer.params import SamplingParams
from pipeinfer.scheduler.request import Request


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

    def request(self, place: int) -> Request:
        """As request.from_work makes it."""
        params = SamplingParams(temperature=0.0, max_tokens=self.output, ignore_eos=True)
        work = Work(
            request_id=self.id,
            attempt=1,
            gateway=0,
            detokenizer=0,
            prompt_ids=pack(self.prompt),
            params=params,
            seed=0,
        )
        return Request(work, place, float("inf"), prompt_len=len(self.prompt), since=self.at)


OUTPUT_IDS = 1 << 30  # prompts use ids below
NOBODY = Work(
    request_id="nobody",
    attempt=1,
    gateway=0,
    detokenizer=0,
    prompt_ids=b"",
    params=SamplingParams(),
    seed=0,
)

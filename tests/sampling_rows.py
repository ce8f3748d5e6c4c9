"""How each row of logits is sampled, and at which positions, in one value.

Import it as `from sampling_rows import ...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeinfer.step import Step


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of the rows of logits, [L] each, in their order.

    fields: by name and dtype as engine/step_builder.py declares. positions: int64, the absolute
    position of the token being sampled.
    """

    fields: Mapping[str, np.ndarray]
    positions: np.ndarray

    def take(self, rows: np.ndarray) -> SamplingRows:
        """Some of the rows."""
        fields = {name: values[rows] for name, values in self.fields.items()}
        return SamplingRows(fields, self.positions[rows])


def sampling_of(step: Step) -> SamplingRows:
    """Of a step without drafts."""
    positions = (step.starts + step.counts)[step.samples].astype(np.int64)
    return SamplingRows(step.fields, positions)

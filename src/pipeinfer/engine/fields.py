"""What a request says of sampling in one number each: declared here and nowhere else.

Tables over slots, what steps carry, what is uploaded, the padding of CUDA graphs and what samplers
are handed follow from it; a sampler alone knows what a number means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pipeinfer.messages import Admit

# Whatever a request says, its numbers fit: the API has bounds of its own.
MOST_K = 2**31 - 1
HOTTEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Field:
    """filler: of a row that is nobody's. of: the number of the request that `admit` admits."""

    name: str
    dtype: Any
    filler: float
    of: Callable[[Admit], float]


FIELDS = (
    Field("temperature", np.float32, 0.0, lambda admit: min(admit.params.temperature, HOTTEST)),
    Field("top_k", np.int32, 0, lambda admit: min(max(admit.params.top_k, 0), MOST_K)),  # 0 is off
    Field("top_p", np.float32, 1.0, lambda admit: admit.params.top_p),  # 1 is off
    Field("min_p", np.float32, 0.0, lambda admit: min(admit.params.min_p, 1.0)),  # 0 is off
    Field("seed", np.uint64, 0, lambda admit: admit.seed & (2**64 - 1)),
)


def filled(count: int, **values: ArrayLike) -> dict[str, np.ndarray]:
    """[count] of each field, by name: `values`, of all or of each, and fillers for the others."""
    return {
        field.name: np.full(count, values.get(field.name, field.filler), dtype=field.dtype)
        for field in FIELDS
    }

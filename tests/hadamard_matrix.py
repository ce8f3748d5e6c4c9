"""The turn of queries and keys of 8 bits as a matrix, by its definition: signs are parities.

Knows no butterflies.
"""

from __future__ import annotations

import torch


def matrix(dim: int) -> torch.Tensor:
    """float64 [dim, dim], symmetric and orthogonal: a turned head is head @ matrix(dim)."""
    half, run = dim // 2, 1
    while half % (2 * run) == 0:
        run *= 2
    made = torch.zeros(dim, dim, dtype=torch.float64)
    for one in range(dim):
        for other in range(dim):
            (high, lane), (higher, further) = divmod(one, half), divmod(other, half)
            if lane // run == further // run:
                common = (lane % run & further % run).bit_count() + (high & higher)
                made[one, other] = (-1) ** common
    return made / (2 * run) ** 0.5

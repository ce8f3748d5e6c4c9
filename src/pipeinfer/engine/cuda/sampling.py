"""Sampling on the device, from parameters that lie in a step's buffer.

Knows views and slots; the kernels are in kernels/gumbel.py.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.kernels.gumbel import sample

NEVER = float("-inf")


def sample_rows(
    logits: torch.Tensor,
    views: dict[str, torch.Tensor],
    last_token: torch.Tensor,
    *,
    truncate: bool,
) -> torch.Tensor:
    """Ids int64 [S], also written to last_token at `write_slots`; -1 for a row of bad logits.

    Without `truncate`, top-k, top-p and min-p are not looked at.
    """
    return sample(
        logits,
        views["temperature"],
        views["top_k"],
        views["top_p"],
        views["min_p"],
        views["seeds"],
        views["sample_positions"],
        truncate=truncate,
        last_token=last_token,
        slots=views["write_slots"],
    )


def suppress(logits: torch.Tensor, pairs: np.ndarray) -> None:
    """Makes the (row, id) `pairs` int64 [n, 2] impossible, in place. Rare: it waits for a copy."""
    if len(pairs):
        at = torch.from_numpy(pairs).to(logits.device)
        logits[at[:, 0], at[:, 1]] = NEVER

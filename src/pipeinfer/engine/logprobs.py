"""Log-probs of tokens out of logits of which each rank has those of a run of the vocabulary.

What ranks say to each other, and in which order. Knows rows and ids; no request, no slot and no
sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.kernels.interface import Kernels

# [ranks, ...]: what every rank has made.
Collect = Callable[[torch.Tensor], torch.Tensor]


def log_probs(
    kernels: Kernels,
    logits: torch.Tensor,
    ids: torch.Tensor,
    most: int,
    first_id: int,
    collect: Collect,
) -> torch.Tensor:
    """As Kernels.scores, from logits [N, share] of the ids from `first_id` on; the same on all
    ranks."""
    own = collect(kernels.own_keys(logits, ids, first_id)).amax(0)
    return kernels.tell(collect(kernels.survey(logits, own, most, first_id)), own)

"""Log-probs of tokens out of logits, with their ranks and the likeliest others.

For one rank or for several with a run of the vocabulary each: what they say to each other, and in
which order. Knows rows and ids; no request, no slot and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.kernels.interface import Kernels

AT_ONCE = 64  # rows: what is made of their logits on the host has three times the logits' size

# [ranks, ...]: what every rank has made.
Collect = Callable[[torch.Tensor], torch.Tensor]


def alone(mine: torch.Tensor) -> torch.Tensor:
    """For a rank that has all logits."""
    return mine[None]


def log_probs(
    kernels: Kernels,
    logits: torch.Tensor,
    ids: torch.Tensor,
    most: int,
    first_id: int = 0,
    collect: Collect = alone,
) -> torch.Tensor:
    """The scores (pipeinfer/logprobs.py) of `ids` int64 [N], each with `most` alternatives, from
    logits [N, share] of the ids from `first_id` on: int32 [N, 2 + 2 most], the same on all ranks.

    Sums are float32. Of equal logits the lowest id is the likeliest.
    """
    if collect is alone:
        return kernels.scores(logits, ids, most)
    every = collect(kernels.own_keys(logits, ids, first_id))
    own = every.amax(0)
    return kernels.tell(collect(kernels.survey(logits, own, most, first_id)), own)

"""Attention with sinks by torch operations: a key of each head that all queries see, and no value.

What it takes of the weights is missing from the others: a head may attend to nothing. Knows no page
and no step. Source: https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

import torch


def attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [..., queries, dim], k, v [..., keys, dim], bias [.., queries, keys], or None, sinks
    [..., 1 or queries, 1], all but q broadcast: q's shape. Weights in float32."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if bias is not None:
        scores += bias
    sinks = sinks.float()
    most = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = (scores - most).exp_()
    weights /= weights.sum(dim=-1, keepdim=True) + (sinks - most).exp()
    return torch.matmul(weights.to(v.dtype), v)

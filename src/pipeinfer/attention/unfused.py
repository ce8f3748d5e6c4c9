"""Attention by torch operations one after the other, for what no fused one of torch knows.

Sinks: a key of each head that all queries see, and no value. What it takes of the weights is
missing from the others: a head may attend to nothing. Source: https://arxiv.org/abs/2309.17453.
Soft caps bound scores. Source: https://arxiv.org/abs/2408.00118. Knows no page and no step.
"""

from __future__ import annotations

import torch

from pipeinfer.steps.shape import AttentionShape


def is_unfused(shape: AttentionShape) -> bool:
    """Whether heads of that shape need `attend_unfused`."""
    return shape.sinks is not None or shape.soft_cap is not None


def attend_unfused(
    shape: AttentionShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [..., queries, dim], k, v [..., keys, dim], bias [.., queries, keys], or None, sinks
    [..., 1 or queries, 1], those of `shape`, all but q broadcast: q's shape. Weights in float32."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * shape.scale
    if shape.soft_cap is not None:
        scores = torch.tanh(scores / shape.soft_cap) * shape.soft_cap
    if bias is not None:
        scores += bias
    if sinks is None:
        return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
    sinks = sinks.float()
    most = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    weights = (scores - most).exp_()
    weights /= weights.sum(dim=-1, keepdim=True) + (sinks - most).exp()
    return torch.matmul(weights.to(v.dtype), v)

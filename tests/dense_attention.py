"""Attention of one whole sequence with a plain mask: what a model is compared with in tests.

Knows no cache and no page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pipeinfer.layers.attention import Attend
from pipeinfer.step import AttentionShape


def split(attend: Callable[..., torch.Tensor]) -> Attend:
    """What a model is called with, out of attend(layer, q, k, v)."""
    return lambda layer, heads: attend(layer, *heads.split_and_rotate())


def dense_causal(shapes: Sequence[AttentionShape]) -> Attend:
    """For a model call whose tokens are one sequence from its start."""
    return split(causal(shapes))


def causal(shapes: Sequence[AttentionShape]) -> Callable[..., torch.Tensor]:
    """attend(layer, q, k, v) of one sequence from its start."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shape = shapes[layer]
        assert q.shape[1:] == (shape.num_heads, shape.head_dim)
        assert k.shape[1:] == v.shape[1:] == (shape.num_kv_heads, shape.head_dim)
        group = shape.num_heads // shape.num_kv_heads
        k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * shape.scale
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        hidden = back < 0
        if shape.sliding_window is not None:
            hidden |= back >= shape.sliding_window
        weights = with_sinks(scores.masked_fill(hidden, float("-inf")), shape).softmax(dim=-1)
        weights = weights[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    return attend


def with_sinks(scores: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Scores [heads, queries, keys] with those of one more key, if heads have a sink."""
    if shape.sinks is None:
        return scores
    sinks = shape.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, sinks), dim=-1)


def decoding(shapes: Sequence[AttentionShape]) -> Attend:
    """For calls that give a sequence token by token: it remembers all keys and values."""
    keys: list[list[torch.Tensor]] = [[] for _ in shapes]
    values: list[list[torch.Tensor]] = [[] for _ in shapes]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shape = shapes[layer]
        keys[layer].append(k.clone())
        values[layer].append(v.clone())
        group = shape.num_heads // shape.num_kv_heads
        past_keys = torch.cat(keys[layer]).repeat_interleave(group, dim=1)
        past_values = torch.cat(values[layer]).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, past_keys) * shape.scale
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), past_values)

    return split(attend)

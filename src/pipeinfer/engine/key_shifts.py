"""What keys are stored less, where pages hold 8 bits: the key that queries see on average.

Subtracted from all keys of a head it changes all scores of a query alike, which softmax does not
see: any vector is right, and the nearer keys are to it, the less is lost when they are rounded.
Found before anything is stored, from fixed ids that mean nothing, so by the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from pipeinfer.attention.unfused import attend_unfused
from pipeinfer.layers.attention import LayerHeads
from pipeinfer.memory.pool import Shift
from pipeinfer.models.interface import Model
from pipeinfer.steps.shape import AttentionShape
from pipeinfer.tensors import tensor_of

TOKENS = 512  # half as many were a little worse, twice as many no better


@torch.inference_mode()
def key_shifts(model: Model, most_tokens: int, where: torch.device) -> tuple[Shift, ...]:
    """Of each layer, after norm and RoPE; None for a layer with sinks or a soft cap, whose weights
    would change. One sequence of at most `most_tokens` is computed, on all ranks of a group.
    """
    average = _Average(model.attention_shapes())
    if any(map(_may_shift, average.shapes)):
        count = min(TOKENS, most_tokens)
        # This generator is frozen: it gives the same ids in every version of NumPy.
        ids = np.random.RandomState(0).randint(0, model.vocabulary.vocab_size, count)
        tokens = tensor_of(ids.astype(np.int64)).to(where)
        model(tokens, torch.arange(count, device=where), average)
    return tuple(average.found)


def _may_shift(shape: AttentionShape) -> bool:
    return shape.sinks is None and shape.soft_cap is None


class _Average:
    """An `Attend` of one sequence from its start, without pages."""

    def __init__(self, shapes: Sequence[AttentionShape]) -> None:
        self.shapes = shapes
        self.found: list[Shift] = [None] * len(shapes)
        self._bias = cache(_bias)

    def __call__(self, layer: int, heads: LayerHeads) -> torch.Tensor:
        """See layers/attention.py."""
        shape = self.shapes[layer]
        q, k, v = (part.transpose(0, 1) for part in heads.split_and_rotate())
        bias = self._bias(q.shape[1], shape.sliding_window, q.device)
        out = q.new_empty((q.shape[1], shape.num_heads, shape.head_dim))
        seen: list[torch.Tensor] = []
        group = shape.num_heads // shape.num_kv_heads
        for head in range(shape.num_kv_heads):  # scores of all at once take too much memory
            of_head = slice(head * group, (head + 1) * group)
            sinks = None if shape.sinks is None else shape.sinks[of_head, None, None]
            # Both in one: what is seen of values, and of keys as if they were values.
            both = torch.cat((v[head], k[head]), dim=-1)
            found = attend_unfused(shape, q[of_head], k[head], both, bias, sinks)
            values, keys = found.chunk(2, dim=-1)
            out[:, of_head] = values.transpose(0, 1)
            seen.append(keys.float().mean(dim=(0, 1)))
        if _may_shift(shape):
            # Where these ids give infinite numbers others need not.
            self.found[layer] = torch.stack(seen).nan_to_num_(0.0, 0.0, 0.0)
        return out


def _bias(count: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[count, count]: 0, or -inf where a query does not see a key."""
    at = torch.arange(count, device=device)
    back = at[:, None] - at
    hidden = (back < 0) if window is None else (back < 0) | (back >= window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))

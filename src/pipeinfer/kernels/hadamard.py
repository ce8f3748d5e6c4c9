"""A turn of heads before they are rounded: sums and differences spread what is large over all.

Queries and keys turned alike have the scores that they had. By torch alone; store.py has the same
in its kernel. Source: QuaRot, https://arxiv.org/abs/2404.00456.
"""

from __future__ import annotations

import torch


def hadamard_transform(heads: torch.Tensor) -> torch.Tensor:
    """float32 [..., dim] of heads of any float dtype, dim even; twice gives them back.

    Orthonormal. A block that is turned has as many values as the largest power of two that divides
    dim: neighbours in both halves of a head. Value by value, so that a token's bits depend on no
    other token.
    """
    dim = heads.shape[-1]
    run = hadamard_half_block(dim)
    wide = heads.float()
    for span in (dim // 2, *(1 << power for power in range(run.bit_length() - 1))):
        pairs = wide.unflatten(-1, (-1, 2, span))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return wide.mul_((2 * run) ** -0.5)


def hadamard_half_block(dim: int) -> int:
    """The neighbours of a block in each half of a head: the largest power of two in dim / 2."""
    half = dim // 2
    return half & -half

"""Rounding to FP8 (e4m3), by rows and by blocks, in plain torch: on any device, without triton.

Knows tensors. Source: https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

import torch

from pipeinfer.kernels.e4m3 import E4M3, E4M3_MAX

SCALE_CANDIDATES = 8  # scales of a row, within a factor of two
SCALE_BLOCK = 128  # rows and columns of weights that share a scale, where blocks do
MIN_SCALE = 1e-12  # of a row of zeros, which are zeros in any scale


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [..., n], float32 scales [..., 1]) of values [..., n] of any float dtype, so that each
    row's largest is 448 times its scale."""
    wide = values.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / E4M3_MAX).clamp_(min=MIN_SCALE)
    return (wide * scale.reciprocal()).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def quantize_rows_min_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_rows`, with the scale, of TRIED from there to twice as much, that has the least
    square error: for weights, which are rounded once.

    Numbers of e4m3 lie as densely around one power of two as around the next, so what matters is
    where between two of them a row's values come to lie.
    """
    wide = values.float()
    _, first = quantize_rows(wide)
    rounded, scale = wide.to(E4M3).view(torch.uint8), first
    least = torch.full_like(first, torch.inf)
    for step in range(SCALE_CANDIDATES):
        tried = first * 2 ** (step / SCALE_CANDIDATES)
        near = (wide / tried).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        error = (near.float() * tried - wide).square_().sum(dim=-1, keepdim=True)
        better = error < least
        rounded = torch.where(better, near.view(torch.uint8), rounded)
        scale, least = torch.where(better, tried, scale), torch.where(better, error, least)
    return rounded.view(E4M3), scale

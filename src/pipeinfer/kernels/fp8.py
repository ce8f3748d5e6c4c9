"""Rounding to FP8 (e4m3), by rows and by blocks, in plain torch: on any device, without triton.

Knows tensors. Source: https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

import torch

from pipeinfer.kernels.e4m3 import E4M3, MOST

LEAST_SCALE = 1e-12  # of a row of zeros, which are zeros in any scale


def round_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [..., n], float32 scales [..., 1]) of values [..., n] of any float dtype, so that each
    row's largest is 448 times its scale."""
    wide = values.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / MOST).clamp_(min=LEAST_SCALE)
    return (wide / scale).clamp_(-MOST, MOST).to(E4M3), scale

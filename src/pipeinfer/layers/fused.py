"""The element-wise operations that a device has as one kernel; None where torch does them.

Chosen once, when a layer is built. Knows no layer and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FusedOps:
    """rms_norm(x, weight, eps): a new tensor. add_rms_norm(x, residual, weight, eps): in place,
    residual becomes the sum and x its norm. silu_and_multiply([T, 2 n]): [T, n].
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
    silu_and_multiply: Callable[[torch.Tensor], torch.Tensor]


def fused_ops(device: torch.device, dtype: torch.dtype) -> FusedOps | None:
    """sgl_kernel's or FlashInfer's where they are installed and take `dtype`, else Triton's."""
    if device.type != "cuda" or dtype not in HALVES:
        return None
    return _libraries()


@lru_cache(maxsize=1)
def _libraries() -> FusedOps:
    for find in (_sgl_kernel, _flashinfer):
        try:
            return find()
        except ImportError:  # not installed, or built for other GPUs
            continue
    return _triton()


def _sgl_kernel() -> FusedOps:
    import sgl_kernel  # type: ignore

    return FusedOps(sgl_kernel.rmsnorm, sgl_kernel.fused_add_rmsnorm, sgl_kernel.silu_and_mul)


def _flashinfer() -> FusedOps:
    from flashinfer.activation import silu_and_mul  # type: ignore
    from flashinfer.norm import fused_add_rmsnorm, rmsnorm  # type: ignore

    return FusedOps(rmsnorm, fused_add_rmsnorm, silu_and_mul)


def _triton() -> FusedOps:
    from pipeinfer.kernels.norm import rms_norm
    from pipeinfer.kernels.swiglu import swiglu

    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rms_norm(x, weight, eps, residual, out=x)

    return FusedOps(rms_norm, add, swiglu)

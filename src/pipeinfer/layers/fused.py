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
    """rms_norm(x, weight, eps): a new tensor. add_rms_norm(x, residual, weight, eps): (norm of the
    sum, the sum), where x and residual were if that is faster. silu_and_multiply([T, 2 n]): [T, n].
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
    ]
    silu_and_multiply: Callable[[torch.Tensor], torch.Tensor]


def fused_ops(device: torch.device, dtype: torch.dtype, compiled: bool = False) -> FusedOps | None:
    """sgl_kernel's or FlashInfer's where they are installed and take `dtype`, else Triton's.

    `compiled`: where there is none of them, by torch.compile.
    """
    if device.type == "cuda" and dtype in HALVES:
        return _libraries()
    if compiled:
        from pipeinfer.layers.compiled import compiled_ops

        return compiled_ops()
    return None


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

    add = _in_place(sgl_kernel.fused_add_rmsnorm)
    return FusedOps(sgl_kernel.rmsnorm, add, sgl_kernel.silu_and_mul)


def _flashinfer() -> FusedOps:
    from flashinfer.activation import silu_and_mul  # type: ignore
    from flashinfer.norm import fused_add_rmsnorm, rmsnorm  # type: ignore

    return FusedOps(rmsnorm, _in_place(fused_add_rmsnorm), silu_and_mul)


def _triton() -> FusedOps:
    from pipeinfer.kernels.norm import rms_norm
    from pipeinfer.kernels.swiglu import swiglu

    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rms_norm(x, weight, eps, residual, out=x)

    return FusedOps(rms_norm, _in_place(add), swiglu)


def _in_place(
    add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], object],
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]:
    """`add` leaves the norm in its first argument and the sum in its second."""

    def both(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        add(x, residual, weight, eps)
        return x, residual

    return both

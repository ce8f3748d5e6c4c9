"""The element-wise operations that a device has as one kernel; None where torch does them.

Chosen once, when a layer is built. Knows no layer and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch

from pipeinfer.layers.elementwise import FusedOps, NormOps

HALVES = (torch.bfloat16, torch.float16)


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
    import sgl_kernel as library  # type: ignore

    return FusedOps(
        NormOps(library.rmsnorm, _in_place(library.fused_add_rmsnorm)),
        NormOps(library.gemma_rmsnorm, _in_place(library.gemma_fused_add_rmsnorm)),
        library.silu_and_mul,
        library.gelu_tanh_and_mul,
    )


def _flashinfer() -> FusedOps:
    from flashinfer import activation, norm  # type: ignore

    return FusedOps(
        NormOps(norm.rmsnorm, _in_place(norm.fused_add_rmsnorm)),
        NormOps(norm.gemma_rmsnorm, _in_place(norm.gemma_fused_add_rmsnorm)),
        activation.silu_and_mul,
        activation.gelu_tanh_and_mul,
    )


def _triton() -> FusedOps:
    from pipeinfer.kernels.activations import geglu, swiglu

    return FusedOps(_triton_norm(0.0), _triton_norm(1.0), swiglu, geglu)


def _triton_norm(offset: float) -> NormOps:
    from pipeinfer.kernels.norm import rms_norm

    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rms_norm(x, weight, eps, residual, out=x, offset=offset)

    return NormOps(partial(rms_norm, offset=offset), _in_place(add))


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

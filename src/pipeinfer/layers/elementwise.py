"""Element-wise operations between products: norms and gated activations, each as one kernel.

`fused_ops` chooses, once, when a layer is built: sgl_kernel's, FlashInfer's or Triton's on a GPU;
with --compile what torch.compile makes of torch's, on devices and in dtypes that have no fused
kernels; None where torch computes them operation by operation. Knows no layer and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.nn import functional


@dataclass(frozen=True)
class NormOps:
    """RMSNorm by one kernel.

    Attributes:
        norm: (x, weight, eps) to a new tensor.
        add_norm: (x, residual, weight, eps) to (norm of x + residual, x + residual), which may
            overwrite x and residual.
    """

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
    ]


@dataclass(frozen=True)
class FusedOps:
    """What a device has as fused kernels.

    Attributes:
        norm: RMSNorm, times the weight.
        gemma_norm: RMSNorm, times one plus the weight, rounded once.
        silu_and_mul: [T, 2 n], gate first, to [T, n].
        gelu_and_mul: the same with GELU as approximated by tanh.
    """

    norm: NormOps
    gemma_norm: NormOps
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor]


HALF_DTYPES = (torch.bfloat16, torch.float16)


def fused_ops(device: torch.device, dtype: torch.dtype, compiled: bool = False) -> FusedOps | None:
    """sgl_kernel's or FlashInfer's where they are installed and take `dtype`, else Triton's.

    `compiled`: where there is none of them, by torch.compile.
    """
    if device.type == "cuda" and dtype in HALF_DTYPES:
        return _libraries()
    if compiled:
        from pipeinfer.layers.elementwise import compiled_ops

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
    from pipeinfer.kernels.elementwise import geglu, swiglu

    return FusedOps(_triton_norm(0.0), _triton_norm(1.0), swiglu, geglu)


def _triton_norm(offset: float) -> NormOps:
    from pipeinfer.kernels.elementwise import rms_norm

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


# Rows of the vectors that are compiled for: one row is compiled by itself, all others together.
WARM_UP_ROWS = (1, 2, 7, 64, 300)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = functional.rms_norm(x.to(torch.float32), (x.shape[-1],), None, eps)
    return wide.to(x.dtype) * weight


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return _rms_norm(total, weight, eps), total


def _gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = functional.rms_norm(x.to(torch.float32), (x.shape[-1],), None, eps)
    return (wide * (1.0 + weight.to(torch.float32))).to(x.dtype)


def _add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return _gemma_rms_norm(total, weight, eps), total


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


@lru_cache(maxsize=1)
def compiled_ops() -> FusedOps:
    """Each is compiled when it is first called: see `warm_up_compiled`."""
    return FusedOps(
        _compiled_norm(_rms_norm, _add_rms_norm),
        _compiled_norm(_gemma_rms_norm, _add_gemma_rms_norm),
        torch.compile(_silu_and_mul, dynamic=True),
        torch.compile(_gelu_and_mul, dynamic=True),
    )


def _compiled_norm(
    norm: Callable[..., torch.Tensor], add: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> NormOps:
    return NormOps(torch.compile(norm, dynamic=True), torch.compile(add, dynamic=True))


@torch.inference_mode()
def warm_up_compiled(
    norm: NormOps,
    multiply: Callable[[torch.Tensor], torch.Tensor],
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compiles what a model calls: in half a minute, or seconds when torch finds its cache.

    Args:
        norm: for vectors [T, hidden].
        multiply: the activation, for vectors [T, 2 * intermediate].
        hidden: size of the residual stream.
        intermediate: this rank's share of the MLP's size.
        dtype: of the vectors.
        device: of the vectors.

    Raises RuntimeError if there is no compiler, or it fails.
    """
    weight = torch.ones(hidden, dtype=dtype, device=device)
    for rows in WARM_UP_ROWS:
        x = torch.zeros(rows, hidden, dtype=dtype, device=device)
        norm.norm(x, weight, 1e-6)
        norm.add_norm(x, x.clone(), weight, 1e-6)
        multiply(torch.zeros(rows, 2 * intermediate, dtype=dtype, device=device))

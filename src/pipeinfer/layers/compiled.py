"""`--compile`: the element-wise operations of the torch path, each as one kernel by torch.compile.

For devices and dtypes that have no fused kernels; see fused.py, which hands these out. Knows no
layer and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn import functional

from pipeinfer.layers.elementwise import FusedOps, NormOps

WARM_UP_ROWS = (1, 2, 7, 64, 300)  # one row is compiled by itself, all others together


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
    """Compiled when first called: use `warm` before anything is in a hurry."""
    return FusedOps(
        _compiled_norm(_rms_norm, _add_rms_norm),
        _compiled_norm(_gemma_rms_norm, _add_gemma_rms_norm),
        torch.compile(_silu_and_mul, dynamic=True),
        torch.compile(_gelu_and_mul, dynamic=True),
    )


def _compiled_norm(
    alone: Callable[..., torch.Tensor], add: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> NormOps:
    return NormOps(torch.compile(alone, dynamic=True), torch.compile(add, dynamic=True))


@torch.inference_mode()
def warm_up_compiled(
    norm: NormOps,
    multiply: Callable[[torch.Tensor], torch.Tensor],
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compiles a model's two for vectors [T, hidden] and [T, 2 * intermediate]: half a minute the
    first time, seconds when torch finds its cache. RuntimeError if there is no compiler, or it
    fails.
    """
    weight = torch.ones(hidden, dtype=dtype, device=device)
    for rows in WARM_UP_ROWS:
        x = torch.zeros(rows, hidden, dtype=dtype, device=device)
        norm.norm(x, weight, 1e-6)
        norm.add_norm(x, x.clone(), weight, 1e-6)
        multiply(torch.zeros(rows, 2 * intermediate, dtype=dtype, device=device))

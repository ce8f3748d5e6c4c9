"""RMSNorm in Triton, alone or fused with the residual addition before it.

For devices on which no library's kernel is better, and for sums that are still partial, which no
library's kernel takes, or that are rounded to FP8; needs triton. Knows vectors, no layer.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.early import pdl_options
from pipeinfer.kernels.rounding import Fp8Output, quantize_groups_reference, store_quantized

NORM_VALUES_PER_THREAD = 4  # values of a vector that a thread has, at most


@triton.jit
def _norm(
    x, residual, weight, out, out_scale, plain, eps, x_stride, partial_stride, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PARTIALS: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
    PART: tl.constexpr, MOST: tl.constexpr, LEAST_SCALE: tl.constexpr, KEEPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row. EARLY: it starts while the kernel before it ends, and lets the next do the same.
    PART: values of out, in e4m3, that share an out_scale; 0: out is not rounded to e4m3. KEEPS:
    plain, too, gets the result."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < SIZE
    factor = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0:
        factor += OFFSET
    if EARLY:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    for partial in tl.static_range(1, PARTIALS):
        at = x + partial * partial_stride + row * x_stride + lane
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * SIZE + lane
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, value, mask=inside)
        # The norm is of the sum as it is stored: what a later layer will add to.
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    normed = value * scale * factor
    if PART:
        store_quantized(normed, out, out_scale, row, SIZE, PART, BLOCK, MOST, LEAST_SCALE)
        if KEEPS:
            tl.store(plain + row * SIZE + lane, normed, mask=inside)
    else:
        tl.store(out + row * SIZE + lane, normed, mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """RMSNorm of x [T, size], or of x + residual, which is then also written into `residual`.
    `offset` is added to the weight.

    Rows of x may be strided; residual and out [T, size] are contiguous; out may be x if that is
    contiguous. float32 inside, rounded once (layer by layer in bfloat16 the product with the
    weight rounds again). Source: https://arxiv.org/abs/1910.07467.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    _launch(x, residual, weight, out, eps, _block(x), offset=offset)
    return out


def rms_norm_quantized(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    group_size: int = 0,
    unquantized_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rms_norm`, or as `sum_norm` for x float32 [P, T, size]: (e4m3 [T, size], float32 scales
    [T, size / part]), rounded once; part 0: a scale a row. plain: [T, size], contiguous, where the
    norm itself is wanted, too."""
    room = Fp8Output.empty(x.device, *x.shape[-2:], group_size)
    values, scale = room.targets
    _launch(
        x, residual, weight, values, eps, _block(x) | room.options, offset, scale, unquantized_out
    )
    return room.filled


def sum_rms_norm(
    partials: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm` of residual [T, size] plus the sum of partials [P, T, size], any float dtype.

    Values of a partial's row lie side by side. The new residual is written where it was; the norm
    has its dtype.
    """
    out = torch.empty_like(residual)
    _launch(partials, residual, weight, out, eps, _block(residual))
    return out


def _block(x: torch.Tensor) -> dict[str, Any]:
    """The options of a launch, whose result is not rounded to e4m3."""
    block = triton.next_power_of_2(x.shape[-1])
    return {
        "SIZE": x.shape[-1], "BLOCK": block, "PART": 0, "MOST": 0.0, "LEAST_SCALE": 0.0,
        "num_warps": min(max(block // (32 * NORM_VALUES_PER_THREAD), 1), 16),
    } | pdl_options(x.device)  # fmt: skip


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    options: dict[str, Any],
    offset: float = 0.0,
    scale: torch.Tensor | None = None,
    plain: torch.Tensor | None = None,
) -> None:
    """x: one [T, size], or [P, T, size]."""
    tokens, partials = x.shape[-2], x.shape[0] if x.dim() == 3 else 1
    if tokens:
        _norm[(tokens,)](
            x, residual, weight, out, scale, plain, eps, x.stride(-2), x.stride(0),
            PARTIALS=partials, ADD=residual is not None, OFFSET=offset, KEEPS=plain is not None,
            **options,
        )  # fmt: skip


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """The same in plain torch."""
    if residual is not None:
        x = residual.copy_(x.float() + residual.float())
    factor = weight.float() + offset
    return torch.nn.functional.rms_norm(x.float(), (x.shape[1],), factor, eps).to(x.dtype)


def rms_norm_quantized_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    offset: float = 0.0,
    group_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rounded_norm` in plain torch."""
    total = x.float().sum(0) if x.dim() == 3 else x.float()
    if residual is not None:
        total = residual.copy_(total + residual.float()).float()
    return quantize_groups_reference(
        rms_norm_reference(total, weight, eps, offset=offset), group_size
    )

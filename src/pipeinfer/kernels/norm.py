"""RMSNorm in Triton, alone or fused with the residual addition before it.

For devices on which no library's kernel is better, and for sums that are still partial, which no
library's kernel takes; needs triton. Knows vectors, no layer.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.early import early_launch

THREAD = 4  # values of a vector that a thread has, at most


@triton.jit
def _norm(
    x, residual, weight, out, eps, x_stride, partial_stride, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, PARTIALS: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row. EARLY: it starts while the kernel before it ends, and lets the next do the same."""
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
    tl.store(out + row * SIZE + lane, value * scale * factor, mask=inside)


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
    _launch(x, residual, weight, out, eps, partials=1, offset=offset)
    return out


def sum_norm(
    partials: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm` of residual [T, size] plus the sum of partials [P, T, size], any float dtype.

    Values of a partial's row lie side by side. The new residual is written where it was; the norm
    has its dtype.
    """
    out = torch.empty_like(residual)
    _launch(partials, residual, weight, out, eps, partials=partials.shape[0])
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    partials: int,
    offset: float = 0.0,
) -> None:
    tokens, size = out.shape
    block = triton.next_power_of_2(size)
    if tokens:
        _norm[(tokens,)](
            x, residual, weight, out, eps, x.stride(-2), x.stride(0), SIZE=size, BLOCK=block,
            PARTIALS=partials, ADD=residual is not None, OFFSET=offset,
            num_warps=min(max(block // (32 * THREAD), 1), 16), **early_launch(x.device),
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

"""RMSNorm in Triton, alone or fused with the residual addition before it.

For devices on which no library's kernel is better; needs triton. Knows vectors, no layer.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm(x, residual, weight, out, eps, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
          ADD: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < SIZE
    value = tl.load(x + row * x_stride + lane, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * SIZE + lane
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, value, mask=inside)
        # The norm is of the sum as it is stored: what a later layer will add to.
        value = value.to(residual.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    value *= scale * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + lane, value, mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm of x [T, size], or of x + residual, which is then also written into `residual`.

    Rows of x may be strided; residual and out [T, size] are contiguous; out may be x if that is
    contiguous. float32 inside, rounded once (layer by layer in bfloat16 the product with the
    weight rounds again). Source: https://arxiv.org/abs/1910.07467.
    """
    tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    block = triton.next_power_of_2(size)
    if tokens:
        _norm[(tokens,)](
            x, residual, weight, out, eps, x.stride(0), SIZE=size, BLOCK=block,
            ADD=residual is not None, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain torch."""
    if residual is not None:
        x = residual.copy_(x.float() + residual.float())
    return torch.nn.functional.rms_norm(x.float(), (x.shape[1],), weight.float(), eps).to(x.dtype)

"""Products of many rows in FP8, where weights have a scale for each block of 128 x 128.

Needs triton. Knows rows and weights, no layer. Source: https://arxiv.org/abs/2412.19437, 3.3.2.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.fp8 import SCALE_BLOCK

TALL = 64  # rows from which on tiles are as high as wide
GROUP = 8  # row blocks that share columns in the L2 cache


@triton.jit
def _product(
    x, x_scale, weight, scale, bias, out, rows, row_blocks, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """One tile of out [rows, WIDTH]: ROWS rows, and the columns of a block."""
    program = tl.program_id(0)
    column_blocks: tl.constexpr = WIDTH // SIDE
    band = program // (GROUP * column_blocks)
    height = tl.minimum(row_blocks - band * GROUP, GROUP)
    within = program % (GROUP * column_blocks)
    row = (band * GROUP + within % height) * ROWS + tl.arange(0, ROWS)
    block = within // height
    column = block * SIDE + tl.arange(0, SIDE)
    depth = tl.arange(0, SIDE)
    real = row < rows
    parts: tl.constexpr = DEPTH // SIDE
    left = x + row.to(tl.int64)[:, None] * DEPTH + depth[None, :]
    right = weight + column.to(tl.int64)[None, :] * DEPTH + depth[:, None]
    total = tl.zeros((ROWS, SIDE), tl.float32)
    for part in range(parts):
        a = tl.load(left + part * SIDE, mask=real[:, None], other=0.0)
        b = tl.load(right + part * SIDE)
        by_row = tl.load(x_scale + row * parts + part, mask=real, other=0.0)
        by_block = tl.load(scale + block * parts + part)
        total += tl.dot(a, b) * (by_row * by_block)[:, None]
    if BIASED:
        total += tl.load(bias + column).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None])


def block_scaled_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, width] of `dtype`: x [T, depth] @ weight [width, depth].T + bias [width].

    x, weight: e4m3; x_scale: float32 [T, depth / 128]; scale: float32 [width / 128, depth / 128];
    all contiguous. Sums are float32, each 128 of the depth are scaled and added in order.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    high = SCALE_BLOCK if rows > TALL else TALL
    blocks = triton.cdiv(rows, high)
    if rows:
        _product[(blocks * (width // SCALE_BLOCK),)](
            x, x_scale, weight, scale, bias, out, rows, blocks, WIDTH=width, DEPTH=depth,
            ROWS=high, SIDE=SCALE_BLOCK, GROUP=GROUP, BIASED=bias is not None, num_warps=8 if high > TALL
            else 4, num_stages=3,
        )  # fmt: skip
    return out


def block_scaled_gemm_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch: float32."""
    left = x.float() * x_scale.repeat_interleave(SCALE_BLOCK, 1)
    right = weight.float() * scale.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(
        SCALE_BLOCK, 1
    )
    return torch.nn.functional.linear(left, right, None if bias is None else bias.float())

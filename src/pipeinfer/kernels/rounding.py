"""Rows rounded to FP8 (e4m3), each with a scale of its own, or one for each 128 of its values.

Needs triton. Knows tensors; fp8.py has the same in plain torch. Source:
https://arxiv.org/abs/2412.19437, 3.3.2.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels.e4m3 import E4M3, MOST
from pipeinfer.kernels.fp8 import LEAST_SCALE, round_rows
from pipeinfer.kernels.triton_e4m3 import as_seen, narrowed

THREAD = 16  # values of a thread


@triton.jit
def _round(
    x, out, scale, x_stride, SIZE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """Program (row, part of it)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    inside = lane < PART
    value = tl.load(x + row * x_stride + part * PART + lane, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(value), axis=0) / MOST, LEAST_SCALE)
    tl.store(scale + row * (SIZE // PART) + part, most)
    at = out + row * SIZE + part * PART + lane
    tl.store(at, narrowed(value, most, out.dtype.element_ty), mask=inside)


def round_parts(x: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, n], float32 scales [T, n / part]) of x [T, n], any float dtype, strided rows; part
    0: all of a row."""
    rows, size = x.shape
    part = part or size
    out = torch.empty(rows, size, dtype=E4M3, device=x.device)
    scale = torch.empty(rows, size // part, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(part)
    if rows:
        _round[(rows, size // part)](
            x, as_seen(out), scale, x.stride(0), SIZE=size, PART=part, BLOCK=block, MOST=MOST,
            LEAST_SCALE=LEAST_SCALE, num_warps=min(max(block // (32 * THREAD), 1), 8),
        )  # fmt: skip
    return out, scale


def round_parts_reference(x: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    rounded, scale = round_rows(x.unflatten(1, (-1, part or x.shape[1])))
    return rounded.flatten(1), scale.flatten(1)

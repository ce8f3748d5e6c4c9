"""GeGLU in Triton: gelu(gate) * up of a merged gate and up product, in one launch.

For devices on which no library's kernel is better; needs triton. Knows no layer.
Source: https://arxiv.org/abs/2002.05202, with the approximation of GELU by tanh.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

BLOCK = 1024
SLOPE = 2 * math.sqrt(2 / math.pi)


@triton.jit
def _geglu(merged, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, SLOPE: tl.constexpr):
    """With weights 0.5 (1 + tanh z), which is sigmoid(2 z)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < SIZE
    gate = tl.load(merged + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(merged + row * stride + SIZE + lane, mask=inside, other=0.0).to(tl.float32)
    weight = tl.sigmoid(SLOPE * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * SIZE + lane, gate * weight * up, mask=inside)


def geglu(merged: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T, 2 n], gate first, to [T, n]; rows may be strided. float32 inside, rounded once."""
    tokens, size = merged.shape[0], merged.shape[1] // 2
    out = merged.new_empty(tokens, size) if out is None else out
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(size))
        _geglu[(tokens, triton.cdiv(size, block))](
            merged, out, merged.stride(0), SIZE=size, BLOCK=block, SLOPE=SLOPE,
            num_warps=max(block // 256, 1),
        )  # fmt: skip
    return out


def geglu_reference(merged: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    gate, up = merged.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(merged.dtype)

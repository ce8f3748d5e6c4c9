"""Rows rounded to FP8 (e4m3), with a scale for each, or for each 128 of its values: by themselves,
or as the last thing that another operation does.

Needs triton. Knows tensors; fp8.py has the same in plain torch. Source:
https://arxiv.org/abs/2412.19437, 3.3.2.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.e4m3 import E4M3, MOST
from pipeinfer.kernels.early import early_launch
from pipeinfer.kernels.fp8 import LEAST_SCALE, round_rows
from pipeinfer.kernels.swiglu import swiglu_reference
from pipeinfer.kernels.triton_e4m3 import as_seen, narrowed

THREAD = 16  # values of a thread, where a program may have so many


@triton.jit
def store_rounded(
    values, out, scale, row, SIZE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, LEAST_SCALE: tl.constexpr,
):  # fmt: skip
    """float32 `values` [BLOCK], zeros from SIZE on, as row `row` of out [rows, SIZE] in e4m3 and of
    scale [rows, SIZE / PART]. PART: SIZE, or a power of two."""
    if PART == SIZE:
        lane = tl.arange(0, BLOCK)
        most = tl.maximum(tl.max(tl.abs(values), axis=0) / MOST, LEAST_SCALE)
        tl.store(scale + row, most)
        rounded = narrowed(values, most, out.dtype.element_ty)
        tl.store(out + row * SIZE + lane, rounded, mask=lane < SIZE)
    else:
        part = tl.arange(0, BLOCK // PART)
        inside = part < SIZE // PART
        parts = tl.reshape(values, (BLOCK // PART, PART))
        most = tl.maximum(tl.max(tl.abs(parts), axis=1) / MOST, LEAST_SCALE)
        tl.store(scale + row * (SIZE // PART) + part, most, mask=inside)
        rounded = narrowed(parts, most[:, None], out.dtype.element_ty)
        at = out + row * SIZE + part[:, None] * PART + tl.arange(0, PART)[None, :]
        tl.store(at, rounded, mask=inside[:, None])


@triton.jit
def _round(
    x, out, scale, x_stride, SIZE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, LEAST_SCALE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if EARLY:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    values = tl.load(x + row * x_stride + lane, mask=lane < SIZE, other=0.0).to(tl.float32)
    store_rounded(values, out, scale, row, SIZE, PART, BLOCK, MOST, LEAST_SCALE)


@triton.jit
def _round_gated(
    merged, out, scale, stride, SIZE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr, LEAST_SCALE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row of SwiGLU, gate first."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < SIZE
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(merged + row * stride + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(merged + row * stride + SIZE + lane, mask=inside, other=0.0).to(tl.float32)
    values = gate * tl.sigmoid(gate) * up
    store_rounded(values, out, scale, row, SIZE, PART, BLOCK, MOST, LEAST_SCALE)


@dataclass(frozen=True)
class Room:
    """For rows [T, size] in e4m3 and their scales, and how kernels that fill it are launched, a
    program a row. part: values that share a scale, 0: all of a row."""

    values: torch.Tensor
    scale: torch.Tensor
    options: dict[str, Any]

    @classmethod
    def on(cls, device: torch.device, rows: int, size: int, part: int) -> Room:
        part = part or size
        block = triton.next_power_of_2(size)
        return cls(
            torch.empty(rows, size, dtype=E4M3, device=device),
            torch.empty(rows, size // part, dtype=torch.float32, device=device),
            {
                "SIZE": size, "PART": part, "BLOCK": block, "MOST": MOST,
                "LEAST_SCALE": LEAST_SCALE, "num_warps": min(max(block // (32 * THREAD), 1), 32),
            } | early_launch(device),
        )  # fmt: skip

    @property
    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As kernels are to be given them."""
        return as_seen(self.values), self.scale

    @property
    def filled(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.values, self.scale


def round_parts(x: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [T, n], float32 scales [T, n / part]) of x [T, n], any float dtype, strided rows; part
    0: all of a row."""
    room = Room.on(x.device, *x.shape, part)
    if len(x):
        _round[(len(x),)](x, *room.targets, x.stride(0), **room.options)
    return room.filled


def round_gated(merged: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_parts`, of SwiGLU of merged [T, 2 n], gate first, which is not rounded before."""
    rows, size = merged.shape[0], merged.shape[1] // 2
    room = Room.on(merged.device, rows, size, part)
    if rows:
        _round_gated[(rows,)](merged, *room.targets, merged.stride(0), **room.options)
    return room.filled


def round_parts_reference(x: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    rounded, scale = round_rows(x.unflatten(1, (-1, part or x.shape[1])))
    return rounded.flatten(1), scale.flatten(1)


def round_gated_reference(merged: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    return round_parts_reference(swiglu_reference(merged.float()), part)

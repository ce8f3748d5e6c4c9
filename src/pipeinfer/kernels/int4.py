"""Products with weights of four bits: of few rows by one kernel, of many behind decoding.

Numbers lie in runs of 128 columns: byte i of a run's 64 has number i in its lower bits and number
64 + i in its upper ones, so that both halves meet rows that lie side by side. Needs triton. Knows
rows and weights, no layer and no file.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

RUN = 128
HALF = 64


@triton.jit
def _weights(
    numbers, scale, zero, column, first, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """(number - zero) * scale in float32 [columns, HALF], of `first` and following in the depth."""
    if GROUP % HALF == 0:
        at = column * GROUPS + first // GROUP
        wide = tl.load(scale + at).to(tl.float32)[:, None]
        low = tl.load(zero + at).to(tl.float32)[:, None]
    else:
        deep = first + tl.arange(0, HALF)
        at = column[:, None] * GROUPS + (deep // GROUP)[None, :]
        wide = tl.load(scale + at).to(tl.float32)
        low = tl.load(zero + at).to(tl.float32)
    return (numbers.to(tl.float32) - low) * wide


@triton.jit
def _product(
    x, numbers, scale, zero, bias, out, rows, x_stride, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    BIASED: tl.constexpr, RUN: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (columns, split of the depth, rows): one tile of out [SPLITS, rows, WIDTH]."""
    share: tl.constexpr = DEPTH // SPLITS
    groups: tl.constexpr = DEPTH // GROUP
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[:, None]
    half = tl.arange(0, HALF)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    bytes_of = numbers + column.to(tl.int64)[:, None] * (DEPTH // 2) + half[None, :]
    left = x + row[:, None] * x_stride + half[None, :]
    for run in range(split * share, split * share + share, RUN):
        both = tl.load(bytes_of + run // 2)
        a = tl.load(left + run, mask=real, other=0.0)
        w = _weights(both & 15, scale, zero, column, run, groups, GROUP, HALF).to(a.dtype)
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
        a = tl.load(left + run + HALF, mask=real, other=0.0)
        w = _weights(both >> 4, scale, zero, column, run + HALF, groups, GROUP, HALF).to(a.dtype)
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    total = tl.trans(total)
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    tl.store(out + (split * rows + row)[:, None] * WIDTH + column[None, :], total, mask=real)


@triton.jit
def _decode(
    numbers, scale, zero, out, DEPTH: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    RUN: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (columns, run of the depth)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    run = tl.program_id(1) * RUN
    half = tl.arange(0, HALF)
    groups: tl.constexpr = DEPTH // GROUP
    row = column.to(tl.int64)[:, None]
    both = tl.load(numbers + row * (DEPTH // 2) + run // 2 + half[None, :])
    at = out + row * DEPTH + run + half[None, :]
    kind = out.dtype.element_ty
    tl.store(at, _weights(both & 15, scale, zero, column, run, groups, GROUP, HALF).to(kind))
    high = _weights(both >> 4, scale, zero, column, run + HALF, groups, GROUP, HALF)
    tl.store(at + HALF, high.to(kind))


def few_rows(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    bias: torch.Tensor | None = None,
    splits: int = 1,
    rows: int = 16,
    columns: int = 32,
) -> torch.Tensor:
    """float32 [splits, T, width], whose sum over the first dimension is the product of x [T, depth]
    with the weights' transpose, plus bias [width].

    numbers: uint8 [width, depth / 2]; scale, any float dtype, and zero, uint8: [width, depth /
    group]. rows, columns: of a tile; columns divides width, and splits * 128 the depth. Rows of x
    may be strided. Weights are rounded to x's dtype, sums are float32.
    """
    (height, depth), width = x.shape, numbers.shape[0]
    out = torch.empty(splits, height, width, dtype=torch.float32, device=x.device)
    if height:
        _product[(width // columns, splits, triton.cdiv(height, rows))](
            x, numbers, scale, zero, bias, out, height, x.stride(0), WIDTH=width, DEPTH=depth,
            GROUP=depth // scale.shape[1], ROWS=rows, COLUMNS=columns, SPLITS=splits,
            BIASED=bias is not None, RUN=RUN, HALF=HALF, num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


def decode(
    numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The weights as they are, [width, depth] of `dtype`; arguments as for `few_rows`."""
    width, depth = numbers.shape[0], 2 * numbers.shape[1]
    out = torch.empty(width, depth, dtype=dtype, device=numbers.device)
    _decode[(width // 8, depth // RUN)](
        numbers, scale, zero, out, DEPTH=depth, GROUP=depth // scale.shape[1], COLUMNS=8, RUN=RUN,
        HALF=HALF,
        num_warps=2,
    )  # fmt: skip
    return out


def decode_reference(
    numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same in plain torch."""
    runs = numbers.unflatten(1, (-1, RUN // 2))
    spread = torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)
    groups = spread.unflatten(1, (scale.shape[1], -1)).float()
    return ((groups - zero[..., None]) * scale[..., None].float()).flatten(1).to(dtype)

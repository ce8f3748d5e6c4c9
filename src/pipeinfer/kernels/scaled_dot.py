"""One step of a product of rows with weights, which may have fewer bits than the rows.

Parts of kernels. Weights become the rows' dtype in registers; their scales are float32. Needs
triton. Knows tiles that are loaded, no layout of weights.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from pipeinfer.kernels import fp8
from pipeinfer.kernels.triton_e4m3 import widened

SIDE = tl.constexpr(fp8.SCALE_BLOCK)
UNSCALED, BY_ROW, BY_BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MXFP4 = tl.constexpr(3)  # e2m1, two columns a byte, and an exponent for each 32 columns of a row
RUN = tl.constexpr(32)  # columns that share an exponent


@triton.jit
def nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROWS_FIRST: tl.constexpr):
    """An empty sum."""
    if ROWS_FIRST:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
    else:
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
    return total


@triton.jit
def dot(a, w, total, ROWS_FIRST: tl.constexpr):
    """total + a @ w.T, or its transpose: tensor cores want 64 rows of the first operand."""
    if ROWS_FIRST:
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    else:
        total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    return total


@triton.jit
def scaled_dot(a, w, total, at, ROWS_FIRST: tl.constexpr, SCALES: tl.constexpr, first=0):
    """total + a @ w.T of rows a [ROWS, DEPTH] and weights w [COLUMNS, DEPTH], or its transpose.

    at: for SCALES by block the scale's address, or addresses that broadcast to total. In MXFP4, for
    a of 16 bits, w is [COLUMNS, DEPTH / 2], and `at` are the addresses [COLUMNS] of four exponents
    each, int32, of which `first` is that of the first column.
    """
    if SCALES == MXFP4:
        total = _mxfp4_dot(a, w, tl.load(at), first, total, ROWS_FIRST)
    elif SCALES == BY_BLOCK:
        part = dot(a, widened(w, a.dtype), tl.zeros_like(total), ROWS_FIRST)
        total += part * tl.load(at)
    else:
        total = dot(a, widened(w, a.dtype), total, ROWS_FIRST)
    return total


@triton.jit
def rounded_dot(a, w, ROWS_FIRST: tl.constexpr):
    """float32 of a [ROWS, DEPTH] @ w [COLUMNS, DEPTH].T, both e4m3, or its transpose; without their
    scales. Tensor cores sum it all, at 14 bits or more."""
    if a.dtype == tl.uint8:  # in the interpreter
        a, w = widened(a, tl.float32), widened(w, tl.float32)
    return dot(a, w, nothing(a.shape[0], w.shape[0], ROWS_FIRST), ROWS_FIRST)


@triton.jit
def _mxfp4_dot(a, w, words, first, total, ROWS_FIRST: tl.constexpr):
    """Exact but for the sum: two bits and a power of two are numbers of 16 bits. Exponents that
    stand for NaN are not looked for."""
    kind: tl.constexpr = "bf16" if a.dtype == tl.bfloat16 else "fp16"
    run = first + tl.arange(0, 2 * w.shape[1] // RUN)
    exponents = (words[:, None] >> (8 * run)[None, :]).to(tl.uint8)
    if ROWS_FIRST:
        w = tl.trans(w)
        total = tl.dot_scaled(a, None, kind, w, exponents, "e2m1", total, fast_math=True)
    else:
        a = tl.trans(a)
        total = tl.dot_scaled(w, exponents, "e2m1", a, None, kind, total, fast_math=True)
    return total


@triton.jit
def along_rows(vector, ROWS_FIRST: tl.constexpr):
    """A vector [ROWS] so that it broadcasts to a sum."""
    return vector[:, None] if ROWS_FIRST else vector[None, :]


@triton.jit
def along_columns(vector, ROWS_FIRST: tl.constexpr):
    """A vector [COLUMNS] so that it broadcasts to a sum."""
    return vector[None, :] if ROWS_FIRST else vector[:, None]

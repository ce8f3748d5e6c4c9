"""One step of a product of rows with weights, which may have fewer bits than the rows.

Parts of kernels. Weights become the rows' dtype in registers; their scales are float32. Needs
triton. Knows tiles that are loaded, no layout of weights.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from pipeinfer.kernels import fp8
from pipeinfer.kernels.triton_e4m3 import widened

SIDE = tl.constexpr(fp8.SIDE)
UNSCALED, BY_ROW, BY_BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def scaled_dot(a, w, total, at, ROWS_FIRST: tl.constexpr, SCALES: tl.constexpr):
    """total + a @ w.T of rows a [ROWS, DEPTH] and weights w [COLUMNS, DEPTH], or its transpose.

    at: for SCALES by block the scale's address, or addresses that broadcast to total.
    """
    w = widened(w, a.dtype)
    if SCALES == BY_BLOCK:
        part = dot(a, w, tl.zeros_like(total), ROWS_FIRST)
        total += part * tl.load(at)
    else:
        total = dot(a, w, total, ROWS_FIRST)
    return total


@triton.jit
def along_columns(vector, ROWS_FIRST: tl.constexpr):
    """A vector [COLUMNS] so that it broadcasts to a sum."""
    return vector[None, :] if ROWS_FIRST else vector[:, None]

"""Products with weights of four bits: of one row, of few rows, and of many behind decoding.

A product with one row takes as long as its weights take to read, if a weight costs hardly more than
two instructions: its bits become a float's mantissa, two of a register at once. Needs triton.
Knows rows and weights, no layer and no file; int4_layout.py has the layout.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.early import early_launch
from pipeinfer.kernels.int4_layout import EACH, RUN
from pipeinfer.kernels.int4_tiles import Cut
from pipeinfer.kernels.prefetch import prefetch

WORDS = tl.constexpr(RUN // EACH)  # of a run
COLUMNS = tl.constexpr(RUN)
LINE = tl.constexpr(32)  # words in a line of the L2 cache


@triton.jit
def _number(words, PLACE: tl.constexpr):
    """float32 of the numbers at PLACE of `words`. As the mantissa's bits from P on they are
    2 ** (23 - P) too much, which a subtraction takes off exactly."""
    P: tl.constexpr = 4 * PLACE if PLACE < 5 else 4 * PLACE - 12
    if PLACE >= 5:
        words = words >> 12
    bits = (words & (15 << P)) | ((150 - P) << 23)
    return bits.to(tl.float32, bitcast=True) - 2.0 ** (23 - P)


@triton.jit
def _twice(values):
    """The bits of 16-bit `values` in both halves of int32."""
    return values.to(tl.uint16, bitcast=True).to(tl.int32) * 0x10001


@triton.jit
def _neighbours(
    words, low, wide, P: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr,
    kind: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """[COUNT, 2 * STEP] of kind: (number - low) * wide, of pair P of each of words [COUNT, STEP].

    HALVES: on a GPU, two at once, kind having 16 bits: low and wide come as _ready makes them.
    """
    if HALVES:
        shifted = words >> (4 * P)
        if kind == tl.bfloat16:
            first, second = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x43004300, 0xEA;"
                " sub.rn.bf16x2 t, t, $3; mul.rn.bf16x2 t, t, $4; mov.b32 {$0, $1}, t; }",
                "=h,=h,r,r,r", [shifted, low, wide], dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=1,
            )  # fmt: skip
        else:
            first, second = tl.inline_asm_elementwise(
                "{ .reg .b32 t; lop3.b32 t, $2, 0x000F000F, 0x64006400, 0xEA;"
                " sub.rn.f16x2 t, t, $3; mul.rn.f16x2 t, t, $4; mov.b32 {$0, $1}, t; }",
                "=h,=h,r,r,r", [shifted, low, wide], dtype=(tl.float16, tl.float16),
                is_pure=True, pack=1,
            )  # fmt: skip
    else:
        first = ((_number(words, P) - low) * wide).to(kind)
        second = ((_number(words, P + 4) - low) * wide).to(kind)
    return tl.reshape(tl.join(first, second), (COUNT, 2 * STEP))


@triton.jit
def _ready(low, wide, kind: tl.constexpr, HALVES: tl.constexpr):
    """Zeros and scales in float32 as _neighbours wants them: its numbers have 128 too much as
    bfloat16, 1,024 as float16, which a subtraction takes off exactly."""
    if HALVES:
        low = _twice((low + (128.0 if kind == tl.bfloat16 else 1024.0)).to(kind))
        wide = _twice(wide.to(kind))
    return low, wide


@triton.jit
def _columns(first, P: tl.constexpr, STEP: tl.constexpr):
    """int32 [2 * STEP]: those of pair P, for words from `first` on."""
    number = 2 * first + tl.arange(0, 2 * STEP)
    return number // (2 * WORDS) * COLUMNS + P * (2 * WORDS) + number % (2 * WORDS)


@triton.jit
def _by_run(
    kept, column, first, COUNT: tl.constexpr, STEP: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """float32 [COUNT, STEP] of scales or zeros, for words from `first` on: of whole runs."""
    run = first // WORDS + tl.arange(0, STEP // WORDS)
    at = column[:, None] * (DEPTH // GROUP) + (run * COLUMNS // GROUP)[None, :]
    found = tl.load(kept + at).to(tl.float32)
    wide = tl.broadcast_to(found[:, :, None], (COUNT, STEP // WORDS, WORDS))
    return tl.reshape(wide, (COUNT, STEP))


@triton.jit
def _of_pair(kept, column, word, P: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    """float32 [columns, words] of scales or zeros, for pair P of each word: of smaller groups."""
    group = (word // WORDS * COLUMNS + P * (2 * WORDS) + word % WORDS * 2) // GROUP
    at = column[:, None] * (DEPTH // GROUP) + group[None, :]
    return tl.load(kept + at).to(tl.float32)


@triton.jit
def _one_row(
    x, numbers, scale, zero, bias, out, rows, x_stride, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (COUNT columns, split of the depth, row): a piece of out [SPLITS, rows, WIDTH]."""
    share: tl.constexpr = DEPTH // 8 // SPLITS
    groups: tl.constexpr = DEPTH // GROUP
    whole: tl.constexpr = GROUP // COLUMNS > 0
    runs: tl.constexpr = STEP // WORDS
    column = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    split, row = tl.program_id(1), tl.program_id(2)
    right = numbers + column.to(tl.int64)[:, None] * (DEPTH // 8) + split * share
    if EARLY:
        lines: tl.constexpr = (STEP + LINE - 1) // LINE
        prefetch(right + tl.arange(0, lines)[None, :] * LINE)
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    total = tl.zeros((COUNT, runs), tl.float32)
    for begin in range(0, share, STEP):
        words = tl.load(right + begin + tl.arange(0, STEP)[None, :])
        word = split * share + begin + tl.arange(0, STEP)
        part = tl.zeros((COUNT, STEP), tl.float32)
        values = tl.zeros((STEP,), tl.float32)
        for pair in tl.static_range(4):
            left = x + row * x_stride + _columns(split * share + begin, pair, STEP)
            both = tl.reshape(tl.load(left).to(tl.float32), (STEP, 2))
            value, next_value = tl.split(both)
            number, next_number = _number(words, pair), _number(words, pair + 4)
            if whole:
                values += value + next_value
            else:
                low = _of_pair(zero, column, word, pair, DEPTH, GROUP)
                wide = _of_pair(scale, column, word, pair, DEPTH, GROUP)
                number, next_number = (number - low) * wide, (next_number - low) * wide
            part += number * value[None, :]
            part += next_number * next_value[None, :]
        by_run = tl.sum(tl.reshape(part, (COUNT, runs, WORDS)), axis=2)
        if whole:
            run = (split * share + begin) // WORDS + tl.arange(0, runs)
            at = column[:, None] * groups + (run * COLUMNS // GROUP)[None, :]
            below = tl.sum(tl.reshape(values, (runs, WORDS)), axis=1)
            by_run -= tl.load(zero + at).to(tl.float32) * below[None, :]
            by_run *= tl.load(scale + at).to(tl.float32)
        total += by_run
    result = tl.sum(total, axis=1)
    if BIASED:
        result += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)
    tl.store(out + (split * rows + row) * WIDTH + column, result)


@triton.jit
def _few_rows(
    x, numbers, scale, zero, bias, out, rows, x_stride, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (COUNT columns, split of the depth, rows): one tile of out [SPLITS, rows, WIDTH]."""
    share: tl.constexpr = DEPTH // 8 // SPLITS
    whole: tl.constexpr = GROUP // COLUMNS > 0
    kind: tl.constexpr = x.dtype.element_ty
    column = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    real = (row < rows)[:, None]
    total = tl.zeros((COUNT, ROWS), tl.float32)
    right = numbers + column.to(tl.int64)[:, None] * (DEPTH // 8)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for begin in range(0, share, STEP):
        word = split * share + begin + tl.arange(0, STEP)
        words = tl.load(right + word[None, :])
        first = split * share + begin
        if whole:
            low = _by_run(zero, column, first, COUNT, STEP, DEPTH, GROUP)
            wide = _by_run(scale, column, first, COUNT, STEP, DEPTH, GROUP)
            low, wide = _ready(low, wide, kind, HALVES)
        for pair in tl.static_range(4):
            left = x + row[:, None] * x_stride + _columns(first, pair, STEP)[None, :]
            a = tl.load(left, mask=real, other=0.0)
            if not whole:
                low = _of_pair(zero, column, word, pair, DEPTH, GROUP)
                wide = _of_pair(scale, column, word, pair, DEPTH, GROUP)
                low, wide = _ready(low, wide, kind, HALVES)
            w = _neighbours(words, low, wide, pair, COUNT, STEP, kind, HALVES)
            total = tl.dot(w, tl.trans(a), total, input_precision="ieee")
    total = tl.trans(total)
    if BIASED:
        total += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)[None, :]
    tl.store(out + (split * rows + row)[:, None] * WIDTH + column[None, :], total, mask=real)


@triton.jit
def _decode(
    numbers, scale, zero, out, DEPTH: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
    STEP: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Program (COUNT columns of the product, STEP words of the depth)."""
    whole: tl.constexpr = GROUP // COLUMNS > 0
    column = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    first = tl.program_id(1) * STEP
    word = first + tl.arange(0, STEP)
    kind: tl.constexpr = out.dtype.element_ty
    row = column.to(tl.int64)[:, None]
    words = tl.load(numbers + row * (DEPTH // 8) + word[None, :])
    if whole:
        low = _by_run(zero, column, first, COUNT, STEP, DEPTH, GROUP)
        wide = _by_run(scale, column, first, COUNT, STEP, DEPTH, GROUP)
        low, wide = _ready(low, wide, kind, HALVES)
    for pair in tl.static_range(4):
        if not whole:
            low = _of_pair(zero, column, word, pair, DEPTH, GROUP)
            wide = _of_pair(scale, column, word, pair, DEPTH, GROUP)
            low, wide = _ready(low, wide, kind, HALVES)
        at = out + row * DEPTH + _columns(first, pair, STEP)[None, :]
        tl.store(at, _neighbours(words, low, wide, pair, COUNT, STEP, kind, HALVES))


def few_rows(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    cut: Cut,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[cut.splits, T, width] of `dtype`, whose sum over the first dimension is the product of x
    [T, depth] with the weights' transpose, plus bias [width].

    numbers: int32 [width, depth / 8]; scale, any float dtype, and zero, uint8: [width, depth /
    group]; groups are whole runs, or 16, 32 or 64 columns. The cut's columns divide width, and its
    splits * words the words of the depth. Rows of x may be strided. With several rows a cut weights
    are rounded to x's dtype; sums are float32.
    """
    (height, depth), width = x.shape, numbers.shape[0]
    out = torch.empty(cut.splits, height, width, dtype=dtype, device=x.device)
    shape = {"WIDTH": width, "DEPTH": depth, "GROUP": depth // scale.shape[1]}
    shape |= {"COUNT": cut.columns, "STEP": cut.words, "SPLITS": cut.splits}
    options = shape | {"num_warps": cut.warps, "num_stages": cut.stages} | early_launch(x.device)
    grid = width // cut.columns, cut.splits, triton.cdiv(height, cut.rows)
    given = x, numbers, scale, zero, bias, out, height, x.stride(0)
    if height and cut.rows == 1:
        _one_row[grid](*given, BIASED=bias is not None, **options)
    elif height:
        halves = _halves(x.dtype, x.device)
        _few_rows[grid](
            *given, ROWS=cut.rows, BIASED=bias is not None, HALVES=halves, **options
        )  # fmt: skip
    return out


def decode(
    numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The weights as they are, [width, depth] of `dtype`; arguments as for `few_rows`."""
    (width, words), columns = numbers.shape, 8
    step = next(n for n in (128, 64, 32, 16) if words % n == 0)
    out = torch.empty(width, words * EACH, dtype=dtype, device=numbers.device)
    _decode[(width // columns, words // step)](
        numbers, scale, zero, out, DEPTH=words * EACH, GROUP=words * EACH // scale.shape[1],
        COUNT=columns, STEP=step, HALVES=_halves(dtype, numbers.device), num_warps=4,
    )  # fmt: skip
    return out


def _halves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether two weights are made at once: by instructions that the interpreter has not."""
    return device.type == "cuda" and dtype != torch.float32

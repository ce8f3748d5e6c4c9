"""Seeded sampling on the device: one pass over the logits, then a small reduction.

Needs triton. Knows rows of parameters, no request; a row's token depends on its own logits,
parameters, seed and position only. What top-k, top-p and min-p leave is truncated.py's business.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from pipeinfer.kernels import noise
from pipeinfer.kernels.lanes import (
    best_of_lanes,
    load_lanes,
    load_share,
    pack,
    peak_of_lanes,
    score_of,
    token_of,
)  # fmt: skip
from pipeinfer.kernels.tables import GREEDY_BELOW
from pipeinfer.kernels.triton_noise import gumbel, words
from pipeinfer.kernels.truncated import (
    CANDIDATES,
    CHUNK,
    PER_BLOCK,
    choose,
    collect,
    is_truncated,
    settle,
)

# Fixed, whatever the batch: partial results must not depend on how many rows there are.
BLOCK = 4096  # logits of one program
WARPS = 4
CHOOSE_WARPS = 16
CHOOSE_REGISTERS = 0  # of a thread, at most; 0: what the compiler takes
_GREEDY = tl.constexpr(GREEDY_BELOW)
_TRUNCATED = tl.constexpr(2)


@triton.jit
def _kind(row, temperatures, top_k, top_p, min_p, vocab, TRUNCATE: tl.constexpr):
    """0 is greedy, 1 is random over the whole row, 2 is truncated."""
    temperature = tl.load(temperatures + row)
    kind = (temperature >= _GREEDY).to(tl.int32)
    if TRUNCATE:
        cut = is_truncated(temperature, top_k + row, top_p + row, min_p + row, vocab, _GREEDY)
        kind += cut.to(tl.int32)
    return kind


@triton.jit
def scan(
    logits, temperatures, top_k, top_p, min_p, seeds, positions, peaks, sums, bests,
    stride, vocab, blocks, skipped, start, BLOCK: tl.constexpr, TRUNCATE: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Program (row, block). Leaves the block's largest logit, its peak, and in `bests`

    the best score x = (logit - peak) / temperature + noise with its id, without noise where
    greedy; of a truncated row, in `sums`, the sum of exp(x) without noise. SHARE: see load_share.
    """
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    kind = _kind(row, temperatures, top_k, top_p, min_p, vocab, TRUNCATE)
    whole = logits + row.to(tl.int64) * stride
    if SHARE:
        l0, l1, l2, l3, counters = load_share(whole, first, skipped, start, vocab, BLOCK)
    else:
        l0, l1, l2, l3, counters = load_lanes(whole, first, vocab, BLOCK)
    none = tl.zeros_like(l0)
    g0, g1, g2, g3 = none, none, none, none
    if kind == 1:  # in front of the peak: made while the logits are on their way
        w0, w1, w2, w3 = words(tl.load(seeds + row), tl.load(positions + row), counters)
        g0, g1, g2, g3 = gumbel(w0), gumbel(w1), gumbel(w2), gumbel(w3)
    peak = peak_of_lanes(l0, l1, l2, l3)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    scale = 1.0 / tl.where(kind == 0, 1.0, tl.load(temperatures + row))
    l0, l1 = (l0 - base) * scale, (l1 - base) * scale
    l2, l3 = (l2 - base) * scale, (l3 - base) * scale
    at = row * blocks + tl.program_id(1)
    tl.store(peaks + at, peak)
    if kind == _TRUNCATED:
        total = tl.exp(l0) + tl.exp(l1) + tl.exp(l2) + tl.exp(l3)
        tl.store(sums + at, tl.sum(total, axis=0))
    else:
        tl.store(bests + at, best_of_lanes(l0 + g0, l1 + g1, l2 + g2, l3 + g3, counters))


@triton.jit
def _reduce(
    temperatures, top_k, top_p, min_p, peaks, bests, drawn, last_token, slots, vocab, blocks,
    BLOCKS: tl.constexpr, TRUNCATE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """One program per row: the best of its blocks. Does nothing for rows that choose() serves."""
    row = tl.program_id(0)
    kind = _kind(row, temperatures, top_k, top_p, min_p, vocab, TRUNCATE)
    if kind != _TRUNCATED:
        at = row * blocks + tl.arange(0, BLOCKS)
        inside = tl.arange(0, BLOCKS) < blocks
        maxima = tl.load(peaks + at, mask=inside, other=float("-inf"))
        best = tl.load(bests + at, mask=inside, other=-(2**63))
        peak = tl.max(maxima, axis=0)
        score = score_of(best)
        score += (maxima - peak) / tl.where(kind == 0, 1.0, tl.load(temperatures + row))
        packed = pack(tl.where(inside, score, float("-inf")), token_of(best))
        token = token_of(tl.max(packed, axis=0))
        settle(
            row, tl.where(tl.abs(peak) < float("inf"), token, -1), drawn, last_token, slots, KEEP
        )


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    min_p: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, *, truncate: bool = True,
    out: torch.Tensor | None = None, last_token: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """int64 [S, 2], of each row how many tokens it gave and which, from logits [S, vocab] (float32,
    bfloat16 or float16, unit last stride).

    Parameters [S] on the device, as in step.py; seeds int64, the bits of the uint64.
    truncate False promises that no row has top_k, top_p or min_p, and saves two launches. A row
    with a NaN, or whose maximum is not finite, gives none, and its id is 0. With last_token int64
    and slots int [S], last_token[slots[r]] becomes row r's id. No synchronisation.
    """
    rows, vocab = logits.shape
    drawn = logits.new_empty(rows, 2, dtype=torch.int64) if out is None else out
    if rows == 0:
        return drawn
    blocks = triton.cdiv(vocab, BLOCK)
    peaks, sums = logits.new_empty(2, rows, blocks, dtype=torch.float32)
    bests = logits.new_empty(rows, blocks, dtype=torch.int64)
    knobs = (temperature, top_k, top_p, min_p)
    scan[(rows, blocks)](
        logits, *knobs, seeds, positions, peaks, sums, bests, logits.stride(0), vocab, blocks,
        0, 0, BLOCK=BLOCK, TRUNCATE=truncate, SHARE=False, num_warps=WARPS,
    )  # fmt: skip
    options = {"BLOCKS": triton.next_power_of_2(blocks), "KEEP": last_token is not None}
    target = (drawn, last_token, slots)
    _reduce[(rows,)](
        *knobs, peaks, bests, *target, vocab, blocks, TRUNCATE=truncate, num_warps=1, **options
    )
    if truncate:
        _truncated(logits, knobs, seeds, positions, peaks, sums, target, options)
    return drawn


def _truncated(
    logits: torch.Tensor, knobs: tuple[torch.Tensor, ...], seeds: torch.Tensor,
    positions: torch.Tensor, peaks: torch.Tensor, sums: torch.Tensor,
    target: tuple[torch.Tensor | None, ...], options: dict[str, int],
) -> None:  # fmt: skip
    """Serves the rows that something restricts; `options` as the reduction has them."""
    rows, vocab = logits.shape
    blocks, padded = peaks.shape[1], options["BLOCKS"]
    per_block = min(PER_BLOCK, BLOCK)
    few = logits.new_empty(rows, blocks * per_block)
    names = logits.new_empty(rows, blocks * per_block, dtype=torch.int16)
    counts = logits.new_empty(rows, blocks, dtype=torch.int32)
    if CHOOSE_REGISTERS:
        options = options | {"maxnreg": CHOOSE_REGISTERS}
    sizes = (logits.stride(0), vocab, blocks)
    collect[(rows, blocks)](
        logits, *knobs, peaks, sums, few, names, counts, *sizes, BLOCKS=padded, BLOCK=BLOCK,
        PER_BLOCK=per_block, GREEDY=GREEDY_BELOW, num_warps=4,
    )  # fmt: skip
    choose[(rows,)](
        logits, *knobs, seeds, positions, peaks, sums, few, names, counts, *target, *sizes,
        PER_BLOCK=per_block, CANDIDATES=CANDIDATES, CHUNK=CHUNK, LANES=BLOCK, GREEDY=GREEDY_BELOW,
        SHIFT=_unused_bits(logits.dtype), num_warps=CHOOSE_WARPS, **options,
    )  # fmt: skip


def _unused_bits(dtype: torch.dtype) -> int:
    """Low bits of the float32 that no value of `dtype` uses."""
    return {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[dtype]


def sample_reference(logits: torch.Tensor, *knobs: torch.Tensor) -> torch.Tensor:
    """The same, but for near ties, by sorting each row on the host in float64."""
    ids = [
        _row_reference(values, *[knob[row].item() for knob in knobs])
        for row, values in enumerate(logits.double().cpu())
    ]
    rows = [[int(token >= 0), max(token, 0)] for token in ids]
    return torch.tensor(rows, dtype=torch.int64, device=logits.device).reshape(-1, 2)


def _row_reference(
    values: torch.Tensor,
    temperature: float,
    k: int,
    p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    if not torch.isfinite(values.max()):
        return -1
    if temperature < GREEDY_BELOW:
        return int(values.argmax())
    x = (values - values.max()) / temperature
    ranked = x.sort(descending=True).values
    if 0 < k < len(x):
        x[x < ranked[k - 1]] = -torch.inf
        ranked[ranked < ranked[k - 1]] = -torch.inf
    if p < 1:
        mass = ranked.exp().cumsum(0)
        x[x < ranked[int((mass < p * mass[-1]).sum())]] = -torch.inf
    x[x.exp() < min_p] = -torch.inf
    seeds = np.array([seed], dtype=np.int64).view(np.uint64)
    drawn = noise.gumbel_noise(seeds, np.array([position]), len(x))[0]
    return int((x + torch.from_numpy(drawn).double()).argmax())

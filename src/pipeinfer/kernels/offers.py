"""Sampling where each rank has a run of the vocabulary: what a rank offers, and how one is chosen.

Needs triton. An offer is two numbers for each row: the best candidate with its score, and the
greatest logit. For rows that are greedy or have a temperature alone. Knows no rank and no exchange.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeinfer.kernels import gumbel
from pipeinfer.kernels.lanes import pack, score_of, token_of
from pipeinfer.kernels.truncated import settle

# int64 [S, 2] of a rank: | score and id, packed as in lanes.py | greatest logit, float32 bits |
# A score is relative to the rank's own greatest logit. Whoever compares scores of several ranks
# first adds what that lies below the greatest of all, over the temperature: 0 for the rank that has
# it, so that the greedy choice is exact.

_GREEDY = tl.constexpr(gumbel.GREEDY_BELOW)
_NOTHING = tl.constexpr(-(2**63))


@triton.jit
def _best(temperatures, maxima, packed):
    """(packed best of several candidates, greatest logit); each is relative to its maximum."""
    temperature = tl.load(temperatures)
    peak = tl.max(maxima, axis=0)
    score = score_of(packed) + (maxima - peak) / tl.where(temperature < _GREEDY, 1.0, temperature)
    # Infinities less infinities are no number, which would sort above all.
    score = tl.where(maxima > float("-inf"), score, float("-inf"))
    return tl.max(pack(score, token_of(packed)), axis=0), peak


@triton.jit
def _offer(temperatures, peaks, bests, offers, blocks, BLOCKS: tl.constexpr):
    """One program per row: the best of its blocks."""
    row = tl.program_id(0)
    at = row * blocks + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCKS) < blocks
    maxima = tl.load(peaks + at, mask=inside, other=float("-inf"))
    packed = tl.load(bests + at, mask=inside, other=_NOTHING)
    best, peak = _best(temperatures + row, maxima, packed)
    tl.store(offers + 2 * row, best)
    tl.store(offers + 2 * row + 1, peak.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def _choose(
    offers, temperatures, drawn, last_token, slots, rows, ranks, RANKS: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """One program per row: the best of all ranks."""
    row = tl.program_id(0)
    rank = tl.arange(0, RANKS)
    at = offers + (rank * rows + row) * 2
    packed = tl.load(at, mask=rank < ranks, other=_NOTHING)
    bits = tl.load(at + 1, mask=rank < ranks, other=0)
    maxima = bits.to(tl.int32).to(tl.float32, bitcast=True)
    best, peak = _best(temperatures + row, tl.where(rank < ranks, maxima, float("-inf")), packed)
    token = tl.where(tl.abs(peak) < float("inf"), token_of(best), -1)
    settle(row, token, drawn, last_token, slots, KEEP)


def local_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor,
    start: int,
) -> torch.Tensor:  # fmt: skip
    """int64 [S, 2]: what this rank offers for rows of logits [S, share], those of ids `start` and
    following. Parameters and dtypes as gumbel.sample has them. No synchronisation.
    """
    rows, share = logits.shape
    offers = logits.new_empty(rows, 2, dtype=torch.int64)
    if rows == 0:
        return offers
    skipped = start % 4  # a counter makes the noise of four ids
    blocks = max(triton.cdiv(share + skipped, gumbel.BLOCK), 1)
    peaks = logits.new_empty(rows, blocks, dtype=torch.float32)
    bests = logits.new_empty(rows, blocks, dtype=torch.int64)
    unused = (temperature,) * 3
    gumbel.scan[(rows, blocks)](
        logits, temperature, *unused, seeds, positions, peaks, peaks, bests, logits.stride(0),
        share, blocks, skipped, start - skipped, BLOCK=gumbel.BLOCK, TRUNCATE=False, SHARE=True,
        num_warps=gumbel.WARPS,
    )  # fmt: skip
    _offer[(rows,)](
        temperature, peaks, bests, offers, blocks, BLOCKS=triton.next_power_of_2(blocks),
        num_warps=1,
    )  # fmt: skip
    return offers


def global_argmax(
    offers: torch.Tensor, temperature: torch.Tensor, last_token: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As gumbel.sample, from the offers of all ranks [ranks, S, 2], in any order of ranks.

    Of equal scores the lowest id.
    """
    ranks, rows, _ = offers.shape
    drawn = offers.new_empty(rows, 2)
    if rows:
        _choose[(rows,)](
            offers.contiguous(), temperature, drawn, last_token, slots, rows, ranks,
            RANKS=triton.next_power_of_2(ranks), KEEP=last_token is not None, num_warps=1,
        )  # fmt: skip
    return drawn

"""Cuts the rows of a decode step into pieces of alike length, the longest first, on the device.

Once a step: the attention of every layer then works through the same list (decode_attention.py).
Needs triton. Knows lengths; neither queries nor keys.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORDS = tl.constexpr(4)  # of a piece
SPLIT = tl.constexpr(1 << 16)  # what one more split adds to the fourth word of a row's pieces


@dataclass(frozen=True)
class Cut:
    """How rows are cut: into at most `extra` pieces more than there are rows, into at most `splits`
    each, and not below `least` tokens. `block` tokens of a piece are read at a time.
    """

    extra: int
    splits: int
    least: int
    block: int
    warps: int
    stages: int


@triton.jit
def _cut(
    lengths, pieces, rows, extra, least, window, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Program (row): each finds the place of its own pieces by what it knows of all rows."""
    one, row = tl.program_id(0), tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < rows, other=0)
    begin = tl.maximum(length - window, 0) // BLOCK * BLOCK
    tokens = length - begin
    most = tl.maximum(tl.maximum(tl.cdiv(tl.sum(tokens), extra), least), tl.cdiv(tokens, SPLITS))
    size = tl.cdiv(tl.cdiv(tokens, tl.maximum(tl.cdiv(tokens, most), 1)), BLOCK) * BLOCK
    splits = tl.cdiv(tokens, tl.maximum(size, BLOCK))
    its_size = tl.sum(tl.where(row == one, size, 0))
    before = (size > its_size) | ((size == its_size) & (row < one))
    first = tl.sum(tl.where(before, splits, 0))
    its_splits = tl.sum(tl.where(row == one, splits, 0))
    its_begin = tl.sum(tl.where(row == one, begin, 0))
    its_length = tl.sum(tl.where(row == one, length, 0))
    split = tl.arange(0, SPLITS)
    at, real = pieces + (first + split) * WORDS, split < its_splits
    start = its_begin + split * its_size
    tl.store(at, tl.full((SPLITS,), one, tl.int32), mask=real)
    tl.store(at + 1, start, mask=real)
    tl.store(at + 2, tl.minimum(start + its_size, its_length), mask=real)
    tl.store(at + 3, tl.zeros((SPLITS,), tl.int32) + first + its_splits * SPLIT, mask=real)
    if one == 0:
        rest = tl.sum(splits) + tl.arange(0, EXTRA)
        tl.store(pieces + rest * WORDS, tl.full((EXTRA,), -1, tl.int32), mask=rest < rows + extra)


def most_pieces(rows: int, cut: Cut) -> int:
    """Of so many rows."""
    return rows + cut.extra


def room_for(pieces: int, device: torch.device) -> torch.Tensor:
    """What `cut_rows` writes so many pieces into."""
    return torch.empty(pieces, WORDS.value, dtype=torch.int32, device=device)


def cut_rows(
    lengths: torch.Tensor, pieces: torch.Tensor, cut: Cut, window: int | None = None
) -> None:
    """Writes `pieces`, int32 [most_pieces, WORDS], for lengths int32 [R]; R is at most 32,768.

    Words of a piece: its row, -1 where there is no such piece; its first token, a multiple of the
    block; the token after its last; and, in two halves, the row's first piece and how many pieces
    it has. All pieces of a row stand together, longer ones before those of other rows. window: keys
    that a query sees: what lies before is left out, but for the rest of a block.
    """
    rows = len(lengths)
    if rows:
        _cut[(rows,)](
            lengths, pieces, rows, cut.extra, cut.least, window or 2**30,
            ROWS=triton.next_power_of_2(rows), SPLITS=cut.splits, BLOCK=cut.block,
            EXTRA=triton.next_power_of_2(rows + cut.extra), num_warps=4,
        )  # fmt: skip


def cut_rows_reference(
    lengths: torch.Tensor, cut: Cut, window: int | None = None
) -> list[tuple[int, int, int, int, int]]:
    """(row, first token, token after the last, first piece of the row, its pieces) of all pieces
    in order, in plain Python."""
    spans = []
    for row, length in enumerate(lengths.tolist()):
        begin = max(length - (window or 2**30), 0) // cut.block * cut.block
        spans.append((row, begin, length))
    share = max(cut.least, -(-sum(length - begin for _, begin, length in spans) // cut.extra))
    rows = []
    for row, begin, length in spans:
        tokens = length - begin
        if tokens:
            splits = -(-tokens // max(share, -(-tokens // cut.splits)))
            size = -(-tokens // (splits * cut.block)) * cut.block
            rows.append((size, row, begin, length))
    found: list[tuple[int, int, int, int, int]] = []
    for size, row, begin, length in sorted(rows, key=lambda one: (-one[0], one[1])):
        starts, first = range(begin, length, size), len(found)
        for start in starts:
            found.append((row, start, min(start + size, length), first, len(starts)))
    return found

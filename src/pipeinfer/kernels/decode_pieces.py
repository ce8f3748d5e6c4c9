"""Cuts the rows of a decode step into pieces of alike length, the longest first, on the device.

Once a step: the attention of every layer then works through the same list (decode_attention.py).
What rows begin with in common is cut into pieces of its own, each for several rows. Needs triton.
Knows lengths and runs; neither queries nor keys.
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pipeinfer import wire

WORDS = tl.constexpr(6)  # of a piece
SPLIT = tl.constexpr(1 << 16)  # what one more split adds to the fourth word of a row's pieces
MERGE_WORDS = tl.constexpr(5)
PART = tl.constexpr(wire.PREFIX_UPPER)
MOST_RUNS = tl.constexpr(wire.MAX_SHARED_PREFIXES)


class Reads(NamedTuple):
    """How a program reads a piece: `block` tokens at a time, so many of which are on their way."""

    block: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeTiles:
    """How rows are cut: into at most `extra` pieces more than there are rows, into at most `splits`
    each, and not below `least` tokens.

    tile: queries, of several rows, that a piece of a run is read for; 0: each row reads for itself.
    Runs are cut into at most `parts` pieces more than there are such tiles, and not below
    `least_shared` tokens. of_runs: how these are read, by a launch of their own; None: as those of
    rows, by the same.
    """

    extra: int
    splits: int
    least: int
    reads: Reads
    tile: int = 0
    parts: int = 64
    least_shared: int = 128
    of_runs: Reads | None = None

    def seats(self, group: int) -> int:
        """Rows that share a piece of a run, with `group` query heads to a KV head; 0: none."""
        return self.tile // group


@dataclass(frozen=True)
class Runs:
    """What R rows begin with in common, int32. lines [R]: leader * PART + pages: as many of the
    row's first pages are those of row `leader`, itself perhaps; 0: it has none in common. seats
    [R]: rank * PART + rows: which of the rows with that leader it is, and how many there are. At
    most MOST_RUNS leaders; a row has tokens behind its run.

    `cut_rows` writes members [R], rows leader by leader in rank order; and merges [R, MERGE_WORDS]:
    how many pieces a row has with those of its run, its own first, the first that its run has for
    it, how many that are, and its rank among the rows of that piece.
    """

    lines: torch.Tensor
    seats: torch.Tensor
    members: torch.Tensor
    merges: torch.Tensor


@triton.jit
def _size(tokens, most, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the pieces of so many tokens, which have at most about `most`."""
    most = tl.maximum(most, tl.cdiv(tokens, SPLITS))
    return tl.cdiv(tl.cdiv(tokens, tl.maximum(tl.cdiv(tokens, most), 1)), BLOCK) * BLOCK


@triton.jit
def _of(one, row, values):
    """The value of row `one`."""
    return tl.sum(tl.where(row == one, values, 0))


@triton.jit
def _cut(
    lengths, pieces, lines, seats, members, merges, rows, extra, least, most_parts, least_shared,
    window,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, RUN_BLOCK: tl.constexpr,
    REST: tl.constexpr, PAGE: tl.constexpr, SEATS: tl.constexpr,
):  # fmt: skip
    """Program (row): each finds the place of its own pieces by what it knows of all rows.

    SEATS: rows that share a piece of a run; 0: nothing is shared.
    """
    one, row, split = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, SPLITS)
    length = tl.load(lengths + row, mask=row < rows, other=0)
    if SEATS > 0:
        line = tl.load(lines + row, mask=row < rows, other=0)
        begin, leader = line % PART * PAGE, line // PART
        seat = tl.load(seats + row, mask=row < rows, other=0)
        many = tl.where((begin > 0) & (leader == row), seat % PART, 0)
        tiles = tl.cdiv(many, SEATS)
        most = tl.cdiv(tl.sum(tiles * begin), most_parts)
        part = _size(begin, tl.maximum(most, least_shared), SPLITS, RUN_BLOCK)
        part = tl.maximum(part, RUN_BLOCK)
        parts = tl.where(many > 0, tl.cdiv(begin, part), 0)
        before = tl.sum(tiles * parts)  # pieces of runs stand before all others
    else:
        begin = tl.maximum(length - window, 0) // BLOCK * BLOCK
        before = 0
    tokens = length - begin
    most = tl.cdiv(tl.sum(tokens), extra)
    size = _size(tokens, tl.maximum(most, least), SPLITS, BLOCK)
    splits = tl.cdiv(tokens, tl.maximum(size, BLOCK))
    its_size, its_splits = _of(one, row, size), _of(one, row, splits)
    its_begin, its_length = _of(one, row, begin), _of(one, row, length)
    earlier = (size > its_size) | ((size == its_size) & (row < one))
    first = before + tl.sum(tl.where(earlier, splits, 0))
    at, real = pieces + (first + split) * WORDS, split < its_splits
    start = its_begin + split * its_size
    tl.store(at, tl.full((SPLITS,), one, tl.int32), mask=real)
    tl.store(at + 1, start, mask=real)
    tl.store(at + 2, tl.minimum(start + its_size, its_length), mask=real)
    tl.store(at + 3, tl.zeros((SPLITS,), tl.int32) + first + its_splits * SPLIT, mask=real)
    if SEATS > 0:
        tl.store(at + 5, tl.zeros((SPLITS,), tl.int32), mask=real)
        lead, rank = _of(one, row, leader), _of(one, row, seat // PART)
        shares = its_begin > 0
        its_part, its_parts = _of(lead, row, part), tl.where(shares, _of(lead, row, parts), 0)
        run_first = tl.sum(tl.where(row < lead, tiles * parts, 0))
        member = tl.sum(tl.where(row < lead, many, 0))
        tl.store(members + member + rank, one, mask=shares)
        merge = merges + one * MERGE_WORDS
        tl.store(merge, its_splits + its_parts)
        tl.store(merge + 1, first)
        tl.store(merge + 2, run_first + rank // SEATS * its_parts)
        tl.store(merge + 3, its_parts)
        tl.store(merge + 4, rank % SEATS)
        count = _of(one, row, many)
        for tile in range(_of(one, row, tiles)):
            at, real = pieces + (run_first + tile * its_parts + split) * WORDS, split < its_parts
            start = split * its_part
            tl.store(at, tl.full((SPLITS,), one, tl.int32), mask=real)
            tl.store(at + 1, start, mask=real)
            tl.store(at + 2, tl.minimum(start + its_part, its_begin), mask=real)
            at_member = tl.zeros((SPLITS,), tl.int32) + member + tile * SEATS
            tl.store(at + 4, at_member, mask=real)
            here = tl.minimum(count - tile * SEATS, SEATS)
            tl.store(at + 5, tl.zeros((SPLITS,), tl.int32) + here, mask=real)
    if one == 0:
        rest = before + tl.sum(splits) + tl.arange(0, REST)
        room = rows + extra
        if SEATS > 0:
            room += most_parts + MOST_RUNS + rows // SEATS
        tl.store(pieces + rest * WORDS, tl.full((REST,), -1, tl.int32), mask=rest < room)


def most_pieces(rows: int, cut: DecodeTiles, seats: int = 0) -> int:
    """Of so many rows, of which `seats` share a piece of a run; 0: they have no runs."""
    return rows + cut.extra + most_of_runs(rows, cut, seats)


def most_of_runs(rows: int, cut: DecodeTiles, seats: int) -> int:
    """Pieces of runs, which stand before all others."""
    return cut.parts + wire.MAX_SHARED_PREFIXES + rows // seats if seats else 0


def room_for(pieces: int, device: torch.device) -> torch.Tensor:
    """What `cut_rows` writes so many pieces into."""
    return torch.empty((pieces, WORDS.value), dtype=torch.int32, device=device)


def room_for_runs(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Members and merges of so many rows."""
    members = torch.empty(rows, dtype=torch.int32, device=device)
    return members, torch.empty((rows, MERGE_WORDS.value), dtype=torch.int32, device=device)


def cut_rows(
    lengths: torch.Tensor,
    pieces: torch.Tensor,
    cut: DecodeTiles,
    window: int | None = None,
    runs: Runs | None = None,
    seats: int = 0,
    page_size: int = 1,
) -> None:
    """Writes `pieces`, int32 [most_pieces, WORDS], for lengths int32 [R]; R is at most 32,768.

    Words of a piece: its row, -1 where there is no such piece; its first token, a multiple of the
    block or the first behind the row's run; the token after its last; and, in two halves, the row's
    first piece and how many pieces it has. All pieces of a row stand together, longer ones before
    those of other rows. window: keys that a query sees: what lies before is left out, but for the
    rest of a block.

    runs: of rows without window, `seats` of which share a piece. Such pieces stand first; the
    leader is their row, and their last two words are where the rows that they are for begin in
    `runs.members`, and how many that are, 0 in a piece of one row.
    """
    rows = len(lengths)
    if rows:
        shared, block = (None,) * 4, cut.reads.block
        if runs is not None:
            shared = runs.lines, runs.seats, runs.members, runs.merges
        _cut[(rows,)](
            lengths, pieces, *shared, rows, cut.extra, cut.least, cut.parts, cut.least_shared,
            window or 2**30, ROWS=triton.next_power_of_2(rows), SPLITS=cut.splits, BLOCK=block,
            RUN_BLOCK=block if cut.of_runs is None else cut.of_runs.block,
            REST=triton.next_power_of_2(most_pieces(rows, cut, seats)), PAGE=page_size,
            SEATS=0 if runs is None else seats, num_warps=4,
        )  # fmt: skip


def cut_rows_reference(
    lengths: torch.Tensor, cut: DecodeTiles, window: int | None = None
) -> list[tuple[int, int, int, int, int]]:
    """(row, first token, token after the last, first piece of the row, its pieces) of all pieces
    in order, in plain Python."""
    spans = []
    for row, length in enumerate(lengths.tolist()):
        begin = max(length - (window or 2**30), 0) // cut.reads.block * cut.reads.block
        spans.append((row, begin, length))
    share = max(cut.least, -(-sum(length - begin for _, begin, length in spans) // cut.extra))
    rows = []
    for row, begin, length in spans:
        tokens = length - begin
        if tokens:
            splits = -(-tokens // max(share, -(-tokens // cut.splits)))
            size = -(-tokens // (splits * cut.reads.block)) * cut.reads.block
            rows.append((size, row, begin, length))
    found: list[tuple[int, int, int, int, int]] = []
    for size, row, begin, length in sorted(rows, key=lambda one: (-one[0], one[1])):
        starts, first = range(begin, length, size), len(found)
        for start in starts:
            found.append((row, start, min(start + size, length), first, len(starts)))
    return found

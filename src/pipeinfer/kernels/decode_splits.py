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

from pipeinfer import packing

SPLIT_WORDS = tl.constexpr(6)  # of a piece
SPLIT_COUNT_UNIT = tl.constexpr(
    1 << 16
)  # what one more split adds to the fourth word of a row's pieces
MERGE_WORDS = tl.constexpr(5)
PART = tl.constexpr(packing.PART)
MOST_RUNS = tl.constexpr(packing.MOST_RUNS)


class LoadConfig(NamedTuple):
    """How a program reads a piece: `block` tokens at a time, so many of which are on their way."""

    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeConfig:
    """How rows are cut: into at most `extra` pieces more than there are rows, into at most `splits`
    each, and not below `least` tokens.

    tile: queries, of several rows, that a piece of a run is read for; 0: each row reads for itself.
    Runs are cut into at most `parts` pieces more than there are such tiles, and not below
    `least_shared` tokens. of_runs: how these are read, by a launch of their own; None: as those of
    rows, by the same.
    """

    extra_splits: int
    max_splits: int
    min_tokens: int
    load: LoadConfig
    prefix_queries: int = 0
    extra_prefix_splits: int = 64
    min_prefix_tokens: int = 128
    prefix_load: LoadConfig | None = None

    def rows_per_prefix_tile(self, group: int) -> int:
        """Rows that share a piece of a run, with `group` query heads to a KV head; 0: none."""
        return self.prefix_queries // group


@dataclass(frozen=True)
class DecodePrefixes:
    """What R rows begin with in common, int32. lines [R]: leader * PART + pages: as many of the
    row's first pages are those of row `leader`, itself perhaps; 0: it has none in common. seats
    [R]: rank * PART + rows: which of the rows with that leader it is, and how many there are. At
    most MOST_RUNS leaders; a row has tokens behind its run.

    `cut_rows` writes members [R], rows leader by leader in rank order; and merges [R, MERGE_WORDS]:
    how many pieces a row has with those of its run, its own first, the first that its run has for
    it, how many that are, and its rank among the rows of that piece.
    """

    leaders: torch.Tensor
    ranks: torch.Tensor
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
    at, real = pieces + (first + split) * SPLIT_WORDS, split < its_splits
    start = its_begin + split * its_size
    tl.store(at, tl.full((SPLITS,), one, tl.int32), mask=real)
    tl.store(at + 1, start, mask=real)
    tl.store(at + 2, tl.minimum(start + its_size, its_length), mask=real)
    tl.store(
        at + 3, tl.zeros((SPLITS,), tl.int32) + first + its_splits * SPLIT_COUNT_UNIT, mask=real
    )
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
            at, real = (
                pieces + (run_first + tile * its_parts + split) * SPLIT_WORDS,
                split < its_parts,
            )
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
        tl.store(pieces + rest * SPLIT_WORDS, tl.full((REST,), -1, tl.int32), mask=rest < room)


def max_total_splits(rows: int, config: DecodeConfig, prefix_rows: int = 0) -> int:
    """Of so many rows, of which `seats` share a piece of a run; 0: they have no runs."""
    return rows + config.extra_splits + max_prefix_splits(rows, config, prefix_rows)


def max_prefix_splits(rows: int, config: DecodeConfig, prefix_rows: int) -> int:
    """Pieces of runs, which stand before all others."""
    return (
        config.extra_prefix_splits + packing.MOST_RUNS + rows // prefix_rows if prefix_rows else 0
    )


def empty_splits(count: int, device: torch.device) -> torch.Tensor:
    """What `cut_rows` writes so many pieces into."""
    return torch.empty((count, SPLIT_WORDS.value), dtype=torch.int32, device=device)


def empty_prefix_merges(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Members and merges of so many rows."""
    members = torch.empty(rows, dtype=torch.int32, device=device)
    return members, torch.empty((rows, MERGE_WORDS.value), dtype=torch.int32, device=device)


def split_rows(
    lengths: torch.Tensor,
    splits: torch.Tensor,
    config: DecodeConfig,
    window: int | None = None,
    prefixes: DecodePrefixes | None = None,
    prefix_rows: int = 0,
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
        shared, block = (None,) * 4, config.load.block_n
        if prefixes is not None:
            shared = prefixes.leaders, prefixes.ranks, prefixes.members, prefixes.merges
        _cut[(rows,)](
            lengths, splits, *shared, rows, config.extra_splits, config.min_tokens, config.extra_prefix_splits, config.min_prefix_tokens,
            window or 2**30, ROWS=triton.next_power_of_2(rows), SPLITS=config.max_splits, BLOCK=block,
            RUN_BLOCK=block if config.prefix_load is None else config.prefix_load.block_n,
            REST=triton.next_power_of_2(max_total_splits(rows, config, prefix_rows)), PAGE=page_size,
            SEATS=0 if prefixes is None else prefix_rows, num_warps=4,
        )  # fmt: skip


def split_rows_reference(
    lengths: torch.Tensor, config: DecodeConfig, window: int | None = None
) -> list[tuple[int, int, int, int, int]]:
    """(row, first token, token after the last, first piece of the row, its pieces) of all pieces
    in order, in plain Python."""
    spans = []
    for row, length in enumerate(lengths.tolist()):
        begin = max(length - (window or 2**30), 0) // config.load.block_n * config.load.block_n
        spans.append((row, begin, length))
    share = max(
        config.min_tokens,
        -(-sum(length - begin for _, begin, length in spans) // config.extra_splits),
    )
    rows = []
    for row, begin, length in spans:
        tokens = length - begin
        if tokens:
            splits = -(-tokens // max(share, -(-tokens // config.max_splits)))
            size = -(-tokens // (splits * config.load.block_n)) * config.load.block_n
            rows.append((size, row, begin, length))
    found: list[tuple[int, int, int, int, int]] = []
    for size, row, begin, length in sorted(rows, key=lambda one: (-one[0], one[1])):
        starts, first = range(begin, length, size), len(found)
        for start in starts:
            found.append((row, start, min(start + size, length), first, len(starts)))
    return found

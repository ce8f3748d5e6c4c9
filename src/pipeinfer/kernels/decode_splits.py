"""Splits the keys of decode rows into parts of similar length, the longest first, on the device.

Once a step: the attention of every layer then works through the same list of splits
(decode_attention.py). A prefix that several rows share has splits of its own, each of which serves
several rows. Needs triton. Knows lengths and shared prefixes; neither queries nor keys.
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

# A split is SPLIT_WORDS words:
#
# | row | first token | end token | first split of the row, + SPLIT_COUNT_UNIT * splits of the row |
#                                                                  | first member | rows it serves |
#
# row: -1 where there is no such split; of a split of a prefix the leader. first token: a multiple
# of the block, or the first one after the row's shared prefix. The last two words are of splits of
# prefixes: where the rows that they serve begin in `members`, and how many these are; 0 in a split
# of one row.
SPLIT_WORDS = tl.constexpr(6)
SPLIT_COUNT_UNIT = tl.constexpr(1 << 16)
# | splits of the row and its prefix | its first own split | the first split that its prefix has for
# it | splits of the prefix | rank among the rows that these serve |
MERGE_WORDS = tl.constexpr(5)
PACKING_BASE = tl.constexpr(wire.PREFIX_UPPER)
MAX_PREFIXES = tl.constexpr(wire.MAX_SHARED_PREFIXES)  # shared prefixes of a step at most


class LoadConfig(NamedTuple):
    """How a program reads the keys and values of a split.

    block_n: tokens of a step.
    num_warps, num_stages: Triton's; so many steps are in flight.
    """

    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DecodeConfig:
    """How rows are split.

    extra_splits: splits that there are at most beside one of each row.
    max_splits: splits of a row at most, a power of two.
    min_tokens: tokens of a split at least.
    load: how splits are read.
    prefix_queries: queries, of several rows, that a split of a shared prefix serves; 0: each row
        reads its prefix itself.
    extra_prefix_splits: splits of prefixes at most, beside one of each tile of prefix_queries.
    min_prefix_tokens: tokens of a split of a prefix at least.
    prefix_load: how splits of prefixes are read, in a launch of their own; None: as those of rows,
        in the same launch.
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
        """Rows that a split of a prefix serves, with `group` query heads to a KV head; 0: none."""
        return self.prefix_queries // group


@dataclass(frozen=True)
class DecodePrefixes:
    """The shared prefixes of R rows, int32. At most MAX_PREFIXES; a row has tokens after its
    prefix.

    leaders [R]: leader * PACKING_BASE + pages: so many of the row's first pages are those of row
        `leader`, which may be the row itself; 0: the row shares no prefix.
    ranks [R]: rank * PACKING_BASE + rows: the row's rank among the rows with this leader, and their
        number.
    members [R]: written by `split_rows`: rows leader by leader, in the order of ranks.
    merges [R, MERGE_WORDS]: written by `split_rows`: which splits make a row.
    """

    leaders: torch.Tensor
    ranks: torch.Tensor
    members: torch.Tensor
    merges: torch.Tensor


@triton.jit
def _split_size(tokens, most, MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of each split of `tokens`, about `most` at most, in whole blocks."""
    most = tl.maximum(most, tl.cdiv(tokens, MAX_SPLITS))
    return tl.cdiv(tl.cdiv(tokens, tl.maximum(tl.cdiv(tokens, most), 1)), BLOCK) * BLOCK


@triton.jit
def _value_of_row(own_row, row, values):
    """The value of row `own_row`."""
    return tl.sum(tl.where(row == own_row, values, 0))


@triton.jit
def _split_rows_kernel(
    seq_lens, splits, leaders, ranks, members, merges, rows, extra_splits, min_tokens,
    extra_prefix_splits, min_prefix_tokens, window, ROWS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, PREFIX_BLOCK: tl.constexpr, PADDED_CAPACITY: tl.constexpr,
    PAGE: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Program (row): each looks at all rows to find where its own splits stand.

    PREFIX_ROWS: rows that a split of a prefix serves; 0: no prefixes are shared.
    """
    own_row, row, index = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, MAX_SPLITS)
    length = tl.load(seq_lens + row, mask=row < rows, other=0)
    if PREFIX_ROWS > 0:
        packed_leader = tl.load(leaders + row, mask=row < rows, other=0)
        begin, leader = packed_leader % PACKING_BASE * PAGE, packed_leader // PACKING_BASE
        packed_rank = tl.load(ranks + row, mask=row < rows, other=0)
        group_rows = tl.where((begin > 0) & (leader == row), packed_rank % PACKING_BASE, 0)
        tiles = tl.cdiv(group_rows, PREFIX_ROWS)
        most = tl.cdiv(tl.sum(tiles * begin), extra_prefix_splits)
        prefix_size = _split_size(
            begin, tl.maximum(most, min_prefix_tokens), MAX_SPLITS, PREFIX_BLOCK
        )
        prefix_size = tl.maximum(prefix_size, PREFIX_BLOCK)
        prefix_splits = tl.where(group_rows > 0, tl.cdiv(begin, prefix_size), 0)
        before = tl.sum(tiles * prefix_splits)  # splits of prefixes stand first
    else:
        begin = tl.maximum(length - window, 0) // BLOCK * BLOCK
        before = 0
    tokens = length - begin
    most = tl.cdiv(tl.sum(tokens), extra_splits)
    size = _split_size(tokens, tl.maximum(most, min_tokens), MAX_SPLITS, BLOCK)
    num_splits = tl.cdiv(tokens, tl.maximum(size, BLOCK))
    own_size = _value_of_row(own_row, row, size)
    own_splits = _value_of_row(own_row, row, num_splits)
    own_begin = _value_of_row(own_row, row, begin)
    own_length = _value_of_row(own_row, row, length)
    earlier = (size > own_size) | ((size == own_size) & (row < own_row))
    first = before + tl.sum(tl.where(earlier, num_splits, 0))
    at, real = splits + (first + index) * SPLIT_WORDS, index < own_splits
    start = own_begin + index * own_size
    tl.store(at, tl.full((MAX_SPLITS,), own_row, tl.int32), mask=real)
    tl.store(at + 1, start, mask=real)
    tl.store(at + 2, tl.minimum(start + own_size, own_length), mask=real)
    first_and_count = first + own_splits * SPLIT_COUNT_UNIT
    tl.store(at + 3, tl.zeros((MAX_SPLITS,), tl.int32) + first_and_count, mask=real)
    if PREFIX_ROWS > 0:
        tl.store(at + 5, tl.zeros((MAX_SPLITS,), tl.int32), mask=real)
        own_leader = _value_of_row(own_row, row, leader)
        own_rank = _value_of_row(own_row, row, packed_rank // PACKING_BASE)
        has_prefix = own_begin > 0
        own_prefix_size = _value_of_row(own_leader, row, prefix_size)
        own_prefix_splits = _value_of_row(own_leader, row, prefix_splits)
        own_prefix_splits = tl.where(has_prefix, own_prefix_splits, 0)
        first_prefix_split = tl.sum(tl.where(row < own_leader, tiles * prefix_splits, 0))
        member = tl.sum(tl.where(row < own_leader, group_rows, 0))
        tl.store(members + member + own_rank, own_row, mask=has_prefix)
        merge = merges + own_row * MERGE_WORDS
        tl.store(merge, own_splits + own_prefix_splits)
        tl.store(merge + 1, first)
        tl.store(merge + 2, first_prefix_split + own_rank // PREFIX_ROWS * own_prefix_splits)
        tl.store(merge + 3, own_prefix_splits)
        tl.store(merge + 4, own_rank % PREFIX_ROWS)
        count = _value_of_row(own_row, row, group_rows)
        for tile in range(_value_of_row(own_row, row, tiles)):
            place = first_prefix_split + tile * own_prefix_splits + index
            at, real = splits + place * SPLIT_WORDS, index < own_prefix_splits
            start = index * own_prefix_size
            tl.store(at, tl.full((MAX_SPLITS,), own_row, tl.int32), mask=real)
            tl.store(at + 1, start, mask=real)
            tl.store(at + 2, tl.minimum(start + own_prefix_size, own_begin), mask=real)
            at_member = tl.zeros((MAX_SPLITS,), tl.int32) + member + tile * PREFIX_ROWS
            tl.store(at + 4, at_member, mask=real)
            here = tl.minimum(count - tile * PREFIX_ROWS, PREFIX_ROWS)
            tl.store(at + 5, tl.zeros((MAX_SPLITS,), tl.int32) + here, mask=real)
    if own_row == 0:
        first_unused = before + tl.sum(num_splits) + tl.arange(0, PADDED_CAPACITY)
        capacity = rows + extra_splits
        if PREFIX_ROWS > 0:
            capacity += extra_prefix_splits + MAX_PREFIXES + rows // PREFIX_ROWS
        tl.store(
            splits + first_unused * SPLIT_WORDS, tl.full((PADDED_CAPACITY,), -1, tl.int32),
            mask=first_unused < capacity,
        )  # fmt: skip


def max_total_splits(rows: int, config: DecodeConfig, prefix_rows: int = 0) -> int:
    """Splits of `rows` rows at most.

    prefix_rows: rows that a split of a prefix serves; 0: no prefixes are shared.
    """
    return rows + config.extra_splits + max_prefix_splits(rows, config, prefix_rows)


def max_prefix_splits(rows: int, config: DecodeConfig, prefix_rows: int) -> int:
    """Splits of prefixes at most, which stand before all others."""
    if not prefix_rows:
        return 0
    return config.extra_prefix_splits + wire.MAX_SHARED_PREFIXES + rows // prefix_rows


def empty_splits(count: int, device: torch.device) -> torch.Tensor:
    """int32 [count, SPLIT_WORDS], for `split_rows`."""
    return torch.empty((count, SPLIT_WORDS.value), dtype=torch.int32, device=device)


def empty_prefix_merges(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(members, merges) of DecodePrefixes, for so many rows."""
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
    """Writes the splits of rows.

    lengths: int32 [R], keys of each row; R is at most 32,768.
    splits: int32 [max_total_splits, SPLIT_WORDS], written. Splits of prefixes stand first, then
        those of rows; all splits of a row stand together, longer ones before those of other rows.
    window: keys that a query sees; earlier ones have no splits, but for the rest of a block.
    prefixes: of rows without window; members and merges are written.
    prefix_rows: rows that a split of a prefix serves.
    """
    rows = len(lengths)
    if rows:
        shared, block = (None,) * 4, config.load.block_n
        if prefixes is not None:
            shared = prefixes.leaders, prefixes.ranks, prefixes.members, prefixes.merges
        _split_rows_kernel[(rows,)](
            lengths, splits, *shared, rows, config.extra_splits, config.min_tokens,
            config.extra_prefix_splits, config.min_prefix_tokens, window or 2**30,
            ROWS=triton.next_power_of_2(rows), MAX_SPLITS=config.max_splits, BLOCK=block,
            PREFIX_BLOCK=block if config.prefix_load is None else config.prefix_load.block_n,
            PADDED_CAPACITY=triton.next_power_of_2(max_total_splits(rows, config, prefix_rows)),
            PAGE=page_size, PREFIX_ROWS=0 if prefixes is None else prefix_rows, num_warps=4,
        )  # fmt: skip


def split_rows_reference(
    lengths: torch.Tensor, config: DecodeConfig, window: int | None = None
) -> list[tuple[int, int, int, int, int]]:
    """(row, first token, end token, first split of the row, its splits) of all splits in order, in
    plain Python."""
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

"""Split-KV attention of one query a row over paged keys and values.

`split_rows`, once a step, splits the keys of decode rows on the device into parts of similar
length, the longest first; nothing is planned on the host. `decode_attention`, one launch a layer,
works through that list of splits. A prefix that several rows share has splits of its own, each of
which serves several rows: its keys and values are read once. Needs triton. Knows rows and pages; no
request and no graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer import wire
from pipeinfer.kernels.formats import E4M3, UNIT_KV_SCALES, KVScales
from pipeinfer.kernels.tile_configs import DecodeConfig
from pipeinfer.kernels.triton_support import (
    L2_LINE_ELEMENTS,
    as_int16_pairs,
    e4m3_pairs_to_fp16,
    pdl_options,
    prefetch_l2,
)

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false


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


@dataclass(frozen=True)
class DecodePrefixes:
    """The shared prefixes of R rows, int32. At most MAX_PREFIXES; a row has tokens after its
    prefix.

    Attributes:
    - leaders [R]: leader * PACKING_BASE + pages: the row's first `pages` pages are those of row
      `leader`, which may be the row itself; 0: the row shares no prefix
    - ranks [R]: rank * PACKING_BASE + rows: the row's rank among the rows with this leader, and
      their number
    - members [R]: written by `split_rows`: rows leader by leader, in the order of ranks
    - merges [R, MERGE_WORDS]: written by `split_rows`: the splits whose results make a row
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
    """Program (row): finds and writes the row's own splits, by the lengths of all rows.

    - PREFIX_ROWS: rows that a split of a prefix serves; 0: no prefixes are shared
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

    - prefix_rows: rows that a split of a prefix serves; 0: no prefixes are shared
    """
    return rows + config.extra_splits + max_prefix_splits(rows, config, prefix_rows)


def max_prefix_splits(rows: int, config: DecodeConfig, prefix_rows: int) -> int:
    """Splits of prefixes at most, which stand before all others."""
    if not prefix_rows:
        return 0
    return config.extra_prefix_splits + wire.MAX_SHARED_PREFIXES + rows // prefix_rows


def empty_splits(count: int, device: torch.device) -> torch.Tensor:
    """Returns int32 [count, SPLIT_WORDS], for `split_rows`."""
    return torch.empty((count, SPLIT_WORDS.value), dtype=torch.int32, device=device)


def empty_prefix_merges(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (members, merges) of DecodePrefixes for `rows` rows, not filled."""
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

    - lengths: int32 [R], keys of each row; R is at most 32,768
    - splits: int32 [max_total_splits, SPLIT_WORDS], written. Splits of prefixes stand first, then
      those of rows; all splits of a row stand together, longer ones before those of other rows
    - window: keys that a query sees; earlier ones have no splits, but for the rest of a block
    - prefixes: of rows without window; members and merges are written
    - prefix_rows: rows that a split of a prefix serves
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
    """Returns (row, first token, end token, first split of the row, its splits) of all splits in
    order, in plain Python.
    """
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


MIN_QUERY_ROWS = 16  # rows of the first operand that tensor cores multiply at least
LOG2E = math.log2(math.e)
# Which splits a launch computes. Two launches follow each other on a stream, that of the prefixes
# first; the second begins while the first still ends, and ends after it.
ALL_SPLITS = tl.constexpr(0)
PREFIX_SPLITS = tl.constexpr(1)
ROW_SPLITS = tl.constexpr(2)


@dataclass(frozen=True)
class DecodeRows:
    """R rows with one query each, int32.

    Attributes:
    - seq_lens [R]: keys of each row; a row may have none
    - kv_indptr [R or more]: where a row's pages begin in kv_indices
    - kv_indices: pages
    - splits: of the rows, see split_rows
    - prefixes: the rows' shared prefixes; None: each row reads all of its keys
    """

    seq_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    splits: torch.Tensor
    prefixes: DecodePrefixes | None = None


@triton.jit
def load_pages(kv_indices, first, at, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of the tokens at .. at + BLOCK - 1: one if a block lies in one page, else [BLOCK];
    any page for tokens past `stop`."""
    token = at if PAGE % BLOCK == 0 else at + tl.arange(0, BLOCK)
    return tl.load(kv_indices + first + token // PAGE, mask=token < stop, other=0)


@triton.jit
def token_offsets(page, at, page_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns [BLOCK], where the keys of these tokens lie, in elements from the begin of the
    pool.
    """
    offset = (at + tl.arange(0, BLOCK)) % PAGE
    return page.to(tl.int64) * page_stride + offset * token_stride


@triton.jit
def _attend_split(
    q, odd, k, v, kv_indices, first, start, stop, window_start, scale, page_stride, token_stride,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, QUERY_ROWS: tl.constexpr,
    WINDOWED: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, E4M3_PAGES: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Returns (greatest score [QUERY_ROWS], sum of weights [QUERY_ROWS], weighted sum [QUERY_ROWS,
    DIM]) over tokens start .. stop - 1, without those before `window_start`.

    - q, odd: see _load_queries
    - WHOLE_BLOCKS: the tokens fill whole blocks
    """
    COLUMNS: tl.constexpr = DIM // 2 if E4M3_PAGES else DIM
    column = tl.arange(0, COLUMNS)
    max_score = tl.full((QUERY_ROWS,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((QUERY_ROWS,), tl.float32)
    acc = tl.zeros((QUERY_ROWS, COLUMNS), tl.float32)
    odd_sums = acc
    page = load_pages(kv_indices, first, start, stop, PAGE, BLOCK)
    for at in range(start, stop, BLOCK):
        following = load_pages(kv_indices, first, at + BLOCK, stop, PAGE, BLOCK)
        element = token_offsets(page, at, page_stride, token_stride, PAGE, BLOCK)
        keys_at = k + element[None, :] + column[:, None]
        values_at = v + element[:, None] + column[None, :]
        if WHOLE_BLOCKS:
            scores = _scores_of(q, odd, tl.load(keys_at, cache_modifier=CACHE), E4M3_PAGES)
            values = tl.load(values_at, cache_modifier=CACHE)
            new_max = tl.maximum(max_score, tl.max(scores, axis=1) * scale)
            weights = tl.exp2(scores * scale - new_max[:, None])  # scaled as they are subtracted
        else:
            token = at + tl.arange(0, BLOCK)
            inside = token < stop
            if WINDOWED:
                inside = inside & (token >= window_start)
            keys = tl.load(keys_at, mask=inside[None, :], other=0, cache_modifier=CACHE)
            scores = _scores_of(q, odd, keys, E4M3_PAGES) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            values = tl.load(values_at, mask=inside[:, None], other=0, cache_modifier=CACHE)
            new_max = tl.maximum(max_score, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(max_score - new_max)
        sum_exp = sum_exp * rescale + tl.sum(weights, axis=1)
        weights = weights.to(q.dtype)
        if E4M3_PAGES:
            even_values, odd_values = e4m3_pairs_to_fp16(values)
            acc = tl.dot(weights, even_values.to(q.dtype), acc * rescale[:, None],
                          input_precision="ieee")  # fmt: skip
            odd_sums = tl.dot(weights, odd_values.to(q.dtype), odd_sums * rescale[:, None],
                              input_precision="ieee")  # fmt: skip
        else:
            acc = tl.dot(weights, values, acc * rescale[:, None], input_precision="ieee")
        max_score, page = new_max, following
    if E4M3_PAGES:
        acc = tl.interleave(acc, odd_sums)
    return max_score, sum_exp, acc


@triton.jit
def _scores_of(q, odd, keys, E4M3_PAGES: tl.constexpr):
    """Scores of queries and keys, float32 [QUERY_ROWS, tokens]."""
    if E4M3_PAGES:
        even_keys, odd_keys = e4m3_pairs_to_fp16(keys)
        scores = tl.dot(q, even_keys.to(q.dtype), input_precision="ieee")
        scores = tl.dot(odd, odd_keys.to(q.dtype), scores, input_precision="ieee")
    else:
        scores = tl.dot(q, keys, input_precision="ieee")
    return scores


@triton.jit
def _load_queries(
    at, real, scale, DIM: tl.constexpr, E4M3_PAGES: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Returns (queries [QUERY_ROWS, DIM], odd queries, the scale that is left for their scores).

    - at: the addresses of the queries
    - E4M3_PAGES: even and odd numbers of the queries, [QUERY_ROWS, DIM / 2] each, since keys come
      in pairs; otherwise the second result is not used

    Two numbers of e4m3 become float16 in one instruction, bfloat16 in four, and both formats hold
    them exactly. Queries in bfloat16 are scaled before they become float16, which has less range.
    """
    COLUMNS: tl.constexpr = DIM // 2 if E4M3_PAGES else DIM
    places = at[:, None] + (tl.arange(0, COLUMNS) * (DIM // COLUMNS))[None, :]
    queries = tl.load(places, mask=real[:, None], other=0.0, cache_modifier=CACHE)
    odd = queries
    if E4M3_PAGES:
        odd = tl.load(places + 1, mask=real[:, None], other=0.0, cache_modifier=CACHE)
    if E4M3_PAGES and queries.dtype == tl.bfloat16:
        queries = (queries.to(tl.float32) * scale).to(tl.float16)
        odd = (odd.to(tl.float32) * scale).to(tl.float16)
        scale = 1.0
    return queries, odd, scale


@triton.jit
def _sink_weight(at, max_score):
    """The weight of an attention sink, whose score lies `at`, relative to `max_score`."""
    return tl.exp2(tl.load(at).to(tl.float32) * 1.4426950408889634 - max_score)


@triton.jit
def _merge_row(
    out, partial_out, partial_max_sum, sinks, first, splits, head, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, MAX_SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one row and KV head into `out`."""
    index, dim = tl.arange(0, MAX_SPLITS), tl.arange(0, DIM)
    there = index < splits
    for query in tl.static_range(GROUP):
        at = ((first + index) * KV_HEADS + head) * GROUP + query
        max_score = tl.load(
            partial_max_sum + 2 * at, mask=there, other=float("-inf"), cache_modifier=".cg"
        )
        sum_exp = tl.load(partial_max_sum + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
        max_of_all = tl.max(max_score, axis=0)
        weight = tl.exp2(max_score - max_of_all)
        acc = tl.load(
            partial_out + at[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        sum_of_all = tl.sum(sum_exp * weight, axis=0)
        if SINKS:
            sum_of_all += _sink_weight(sinks + head * GROUP + query, max_of_all)
        value = tl.sum(acc * weight[:, None], axis=0) / sum_of_all
        tl.store(out + query * DIM + dim, value)


@triton.jit
def _max_of_splits(partial_max_sum, at, stride, count, MAX_SPLITS: tl.constexpr):
    """The greatest score of the first `count` splits of each query, which lie `stride` apart from
    `at` on."""
    index = tl.arange(0, MAX_SPLITS)
    places = partial_max_sum + 2 * (at[:, None] + index[None, :] * stride)
    there = index[None, :] < count[:, None]
    return tl.max(tl.load(places, mask=there, other=float("-inf"), cache_modifier=".cg"), axis=1)


@triton.jit
def _accumulate_splits(
    partial_out, partial_max_sum, at, stride, count, max_of_all, sum_of_all, value, dim,
    DIM: tl.constexpr,
):  # fmt: skip
    """`sum_of_all` and `value` [queries, dim] with these splits added in their order; four are read
    at a time."""
    for begin in range(0, tl.max(count, axis=0), 4):
        for step in tl.static_range(4):
            index = begin + step
            there, at_split = index < count, at + index * stride
            max_score = tl.load(
                partial_max_sum + 2 * at_split, mask=there, other=float("-inf"),
                cache_modifier=".cg",
            )  # fmt: skip
            sum_exp = tl.load(
                partial_max_sum + 2 * at_split + 1, mask=there, other=0.0, cache_modifier=".cg"
            )
            part = tl.load(
                partial_out + at_split[:, None] * DIM + dim[None, :], mask=there[:, None],
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            weight = tl.exp2(max_score - max_of_all)
            sum_of_all += sum_exp * weight
            value += part * weight[:, None]
    return sum_of_all, value


@triton.jit
def _merge_with_prefix(
    out, partial_out, partial_max_sum, prefix_out, prefix_max_sum, merges, sinks, row, query,
    wanted, head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr, QUERY_ROWS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the own splits of each `wanted` pair of row and query head, and then those of its
    prefix. A pair's result is the same bits whether one row is merged here or all rows that share
    a split."""
    merge = merges + row * MERGE_WORDS
    prefix_splits = tl.load(merge + 3, mask=wanted, other=0)
    own_splits = tl.load(merge, mask=wanted, other=0) - prefix_splits
    at = (tl.load(merge + 1, mask=wanted, other=0) * KV_HEADS + head) * GROUP + query
    rank = tl.load(merge + 4, mask=wanted, other=0) * GROUP + query
    prefix_at = (tl.load(merge + 2, mask=wanted, other=0) * KV_HEADS + head) * QUERY_ROWS + rank
    max_of_all = _max_of_splits(partial_max_sum, at, KV_HEADS * GROUP, own_splits, MAX_SPLITS)
    prefix_max = _max_of_splits(
        prefix_max_sum, prefix_at, KV_HEADS * QUERY_ROWS, prefix_splits, MAX_SPLITS
    )
    max_of_all = tl.where(wanted, tl.maximum(max_of_all, prefix_max), 0.0)
    place = out + ((row * KV_HEADS + head) * GROUP + query)[:, None] * DIM
    # As many columns at a time as there are registers for.
    COLUMNS: tl.constexpr = min(DIM, 2048 // query.shape[0])
    for part in tl.static_range(DIM // COLUMNS):
        dim = part * COLUMNS + tl.arange(0, COLUMNS)
        sum_of_all = tl.zeros_like(max_of_all)
        value = tl.zeros((query.shape[0], COLUMNS), tl.float32)
        sum_of_all, value = _accumulate_splits(
            partial_out, partial_max_sum, at, KV_HEADS * GROUP, own_splits, max_of_all, sum_of_all,
            value, dim, DIM,
        )  # fmt: skip
        sum_of_all, value = _accumulate_splits(
            prefix_out, prefix_max_sum, prefix_at, KV_HEADS * QUERY_ROWS, prefix_splits, max_of_all,
            sum_of_all, value, dim, DIM,
        )  # fmt: skip
        if SINKS:
            sum_of_all += _sink_weight(sinks + head * GROUP + query, max_of_all)
        tl.store(place + dim[None, :], value / sum_of_all[:, None], mask=wanted[:, None])


@triton.jit
def _decode_attention_kernel(
    q, k, v, out, partial_out, partial_max_sum, prefix_out, prefix_max_sum, counters, seq_lens,
    kv_indptr, kv_indices, splits, members, merges, sinks, scale, v_scale, window, q_stride,
    page_stride, token_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, QUERY_ROWS: tl.constexpr,
    PREFIX_QUERIES: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    E4M3_PAGES: tl.constexpr, USE_PDL: tl.constexpr, WHICH_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (KV head, split). The program of a row's last split to end merges all of the row.

    - E4M3_PAGES: pages hold pairs of e4m3; values are multiplied by v_scale, and `scale` includes
      the scale of the keys
    - PREFIX_QUERIES: queries that a split of a prefix serves; 0: no prefixes are shared
    - WHICH_SPLITS: ALL_SPLITS, PREFIX_SPLITS or ROW_SPLITS
    - USE_PDL: with two launches, that of the prefixes waits for the kernel before it begins, and
      that of the rows waits for the other one when it ends: so the next kernel waits for both
    """
    head, split = tl.program_id(0), tl.program_id(1)
    COLUMNS: tl.constexpr = DIM // 2 if E4M3_PAGES else DIM
    of_head = head * COLUMNS  # where the head begins in a token's keys
    words = splits + split * SPLIT_WORDS
    row = tl.load(words).to(tl.int64)
    prefix_rows = tl.load(words + 5) if PREFIX_QUERIES > 0 else 0
    other = row < 0
    if WHICH_SPLITS == PREFIX_SPLITS:
        other = other | (prefix_rows == 0)
    elif WHICH_SPLITS == ROW_SPLITS:
        other = other | (prefix_rows > 0)
    if other:
        # One program of such a launch must have waited, even if there is nothing to compute.
        if USE_PDL and WHICH_SPLITS != ALL_SPLITS and split == tl.num_programs(1) - 1:
            gdc_wait()
        return
    start, stop, first_and_count = tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    begin = tl.load(kv_indptr + row)
    window_start = tl.load(seq_lens + row) - window if WINDOWED else 0
    if USE_PDL:
        if WHICH_SPLITS != ROW_SPLITS:
            page = load_pages(kv_indices, begin, start, stop, PAGE, BLOCK)
            element = token_offsets(page, start, page_stride, token_stride, PAGE, BLOCK)
            _prefetch_keys_values(k + of_head, v + of_head, element, COLUMNS)
            gdc_wait()  # for the query, and for the key and value of this step
        gdc_launch_dependents()
    # Data that the launch has not waited for itself must not be read from the L1 cache.
    CACHE: tl.constexpr = ".cg" if USE_PDL and WHICH_SPLITS == ROW_SPLITS else ""
    if WHICH_SPLITS == ALL_SPLITS and PREFIX_QUERIES > 0:
        in_prefix = prefix_rows > 0
    else:
        in_prefix: tl.constexpr = WHICH_SPLITS == PREFIX_SPLITS
    if in_prefix:
        _attend_prefix_split(
            q, k + of_head, v + of_head, out, partial_out, partial_max_sum, prefix_out,
            prefix_max_sum, counters, kv_indices, members + tl.load(words + 4), merges, sinks, head,
            split, prefix_rows, begin, start, stop, scale, v_scale, q_stride, page_stride,
            token_stride, KV_HEADS, GROUP, DIM, PAGE, BLOCK, MAX_SPLITS, PREFIX_QUERIES, SINKS,
            E4M3_PAGES,
        )  # fmt: skip
    else:
        dim, query = tl.arange(0, DIM), tl.arange(0, QUERY_ROWS)
        head_offsets, real = (head * GROUP + query)[:, None] * DIM + dim[None, :], query < GROUP
        first, num_splits = first_and_count % SPLIT_COUNT_UNIT, first_and_count // SPLIT_COUNT_UNIT
        if PREFIX_QUERIES > 0:
            num_splits = tl.load(merges + row * MERGE_WORDS)
        queries_at = q + row * q_stride + (head * GROUP + query) * DIM
        queries, odd, scale = _load_queries(queries_at, real, scale, DIM, E4M3_PAGES, CACHE)
        max_score, sum_exp, acc = _attend_split(
            queries, odd, k + of_head, v + of_head, kv_indices, begin, start, stop, window_start,
            scale, page_stride, token_stride, DIM, PAGE, BLOCK, QUERY_ROWS, WINDOWED, False,
            E4M3_PAGES, CACHE,
        )  # fmt: skip
        if E4M3_PAGES:
            acc *= v_scale
        target = out + row * (KV_HEADS * GROUP * DIM)
        if num_splits == 1:
            if SINKS:
                sum_exp += _sink_weight(
                    sinks + head * GROUP + tl.minimum(query, GROUP - 1), max_score
                )
            tl.store(target + head_offsets, acc / sum_exp[:, None], mask=real[:, None])
        else:
            at = (split * KV_HEADS + head) * GROUP + query
            _store_partial(
                partial_out + at[:, None] * DIM + dim[None, :], partial_max_sum + 2 * at, max_score,
                sum_exp, acc, real,
            )  # fmt: skip
            counter = counters + row * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                tl.store(counter, 0)  # for the next launch
                if PREFIX_QUERIES > 0:
                    only_row = tl.zeros((QUERY_ROWS,), tl.int64) + row
                    _merge_with_prefix(
                        out, partial_out, partial_max_sum, prefix_out, prefix_max_sum, merges,
                        sinks, only_row, tl.minimum(query, GROUP - 1), real, head, KV_HEADS, GROUP,
                        DIM, MAX_SPLITS, PREFIX_QUERIES, SINKS,
                    )  # fmt: skip
                else:
                    _merge_row(
                        target + head * GROUP * DIM, partial_out, partial_max_sum, sinks, first,
                        num_splits, head, KV_HEADS, GROUP, DIM, MAX_SPLITS, SINKS,
                    )  # fmt: skip
    if USE_PDL and WHICH_SPLITS == ROW_SPLITS:
        gdc_wait()


@triton.jit
def _attend_prefix_split(
    q, k, v, out, partial_out, partial_max_sum, prefix_out, prefix_max_sum, counters, kv_indices,
    members, merges, sinks, head, split, prefix_rows, begin, start, stop, scale, v_scale, q_stride,
    page_stride, token_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, QUERY_ROWS: tl.constexpr,
    SINKS: tl.constexpr, E4M3_PAGES: tl.constexpr,
):  # fmt: skip
    """A split of a shared prefix, for the queries of `prefix_rows` rows at once.

    - k, v: of the head
    - members: the first row that the split serves
    """
    dim, query = tl.arange(0, DIM), tl.arange(0, QUERY_ROWS)
    member = query // GROUP
    real = member < prefix_rows
    row = tl.load(members + member, mask=real, other=0).to(tl.int64)
    queries_at = q + row * q_stride + (head * GROUP + query % GROUP) * DIM
    queries, odd, scale = _load_queries(queries_at, real, scale, DIM, E4M3_PAGES, "")
    max_score, sum_exp, acc = _attend_split(
        queries, odd, k, v, kv_indices, begin, start, stop, 0, scale, page_stride, token_stride,
        DIM, PAGE, BLOCK, QUERY_ROWS, False, PAGE % BLOCK == 0, E4M3_PAGES, "",
    )  # fmt: skip
    if E4M3_PAGES:
        acc *= v_scale
    at = (split * KV_HEADS + head) * QUERY_ROWS + query
    _store_partial(
        prefix_out + at[:, None] * DIM + dim[None, :], prefix_max_sum + 2 * at, max_score, sum_exp,
        acc, real,
    )  # fmt: skip
    once = real & (query % GROUP == 0)
    num_splits = tl.load(merges + row * MERGE_WORDS, mask=once, other=0)
    arrivals = tl.atomic_add(counters + row * KV_HEADS + head, 1, mask=once, sem="acq_rel")
    last = (once & (arrivals == num_splits - 1)).to(tl.int32)
    if tl.sum(last) > 0:
        tl.store(counters + row * KV_HEADS + head, 0, mask=once & (last > 0))
        same = member[:, None] == member[None, :]
        wanted = real & (tl.sum(tl.where(same, last[None, :], 0), axis=1) > 0)
        _merge_with_prefix(
            out, partial_out, partial_max_sum, prefix_out, prefix_max_sum, merges, sinks, row,
            query % GROUP, wanted, head, KV_HEADS, GROUP, DIM, MAX_SPLITS, QUERY_ROWS, SINKS,
        )  # fmt: skip


@triton.jit
def _store_partial(sums_at, scales_at, max_score, sum_exp, acc, real):
    """Leaves the result of a split for the program that merges its row."""
    tl.store(sums_at, acc, mask=real[:, None])
    tl.store(scales_at, max_score, mask=real)
    tl.store(scales_at + 1, sum_exp, mask=real)
    tl.debug_barrier()  # all threads have written before one of them counts the split as done


@triton.jit
def _prefetch_keys_values(k, v, element, COLUMNS: tl.constexpr):
    """Prefetches the first keys and values; all but the newest were written by earlier steps."""
    LINES: tl.constexpr = (COLUMNS + L2_LINE_ELEMENTS - 1) // L2_LINE_ELEMENTS
    line = tl.arange(0, LINES) * L2_LINE_ELEMENTS
    prefetch_l2(k + element[:, None] + line[None, :])
    prefetch_l2(v + element[:, None] + line[None, :])


class DecodeWorkspace:
    """Results of the programs of a launch for the programs that merge them. Float32, but for the
    counters.

    Attributes:
    - partial_out: [splits, heads, dim], weighted sums of values
    - partial_max_sum: [splits, heads, 2], greatest score and sum of weights
    - prefix_partial_out, prefix_partial_max_sum: results of splits of prefixes, [prefix_splits,
      kv_heads, prefix_queries, ...]
    - counters: int32 [rows, kv_heads], splits that have ended; zeros between launches
    """

    def __init__(
        self,
        rows: int,
        splits: int,
        heads: tuple[int, int, int],
        device: torch.device,
        prefix_splits: int = 0,
        prefix_queries: int = 0,
    ) -> None:
        """Allocates the workspace.

        - rows, splits, prefix_splits: of a launch at most
        - heads: query heads, KV heads, and their size
        - prefix_queries: queries that a split of a prefix serves
        """
        num_heads, kv_heads, dim = heads
        shared = prefix_splits * kv_heads * prefix_queries
        self.partial_out = torch.empty(splits * num_heads * dim, device=device)
        self.partial_max_sum = torch.empty(splits * num_heads * 2, device=device)
        self.prefix_partial_out = torch.empty(shared * dim, device=device)
        self.prefix_partial_max_sum = torch.empty(shared * 2, device=device)
        self.counters = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: DecodeRows,
    scale: float,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    window: int | None = None,
    use_pdl: bool = True,
    sinks: torch.Tensor | None = None,
    scales: KVScales = UNIT_KV_SCALES,
) -> torch.Tensor:
    """softmax(q k^T * scale) v of each row's last token: `out`, which is returned. float32 inside.

    - q: [R, heads, dim]; rows may be strided
    - k, v: [pages, page_size, kv_heads, dim], laid out alike; dim is a power of two, in e4m3 at
      least 32
    - rows: split by `split_rows` with the same config, window and prefixes
    - scale: of scores
    - out: [R, heads, dim]; rows without keys are not written
    - workspace: large enough for the rows and their splits
    - window: keys that a query sees, its own included
    - use_pdl: False right after the rows were split: the launch reads splits before the kernel
      before has ended, but nothing else
    - sinks: [heads], attention sinks: a score without a value that every query of the head sees
    - scales: of k and v in e4m3, which are multiplied as float16 where q is bfloat16
    """
    (count, heads, dim), (page_size, kv_heads) = q.shape, k.shape[1:3]
    k, v, is_e4m3 = as_int16_pairs(k), as_int16_pairs(v), k.dtype == E4M3
    if count:
        group, prefixes = heads // kv_heads, rows.prefixes
        prefix_rows = 0 if prefixes is None else config.rows_per_prefix_tile(group)
        splits = max_total_splits(count, config, prefix_rows)
        launches = [(ALL_SPLITS, splits, config.load)]
        if prefix_rows and config.prefix_load is not None:
            prefix_splits = max_prefix_splits(count, config, prefix_rows)
            launches = [
                (PREFIX_SPLITS, prefix_splits, config.prefix_load),
                (ROW_SPLITS, splits, config.load),
            ]
        for which, programs, load in launches:
            _decode_attention_kernel[(kv_heads, programs)](
                q, k, v, out, workspace.partial_out, workspace.partial_max_sum,
                workspace.prefix_partial_out, workspace.prefix_partial_max_sum, workspace.counters,
                rows.seq_lens, rows.kv_indptr, rows.kv_indices, rows.splits,
                prefixes and prefixes.members, prefixes and prefixes.merges, sinks,
                scale * scales.k * LOG2E, scales.v, window or 2**30, q.stride(0), k.stride(0),
                k.stride(1), KV_HEADS=kv_heads, GROUP=group, DIM=dim, PAGE=page_size,
                BLOCK=load.block_n, MAX_SPLITS=config.max_splits,
                QUERY_ROWS=max(MIN_QUERY_ROWS, triton.next_power_of_2(group)),
                PREFIX_QUERIES=config.prefix_queries if prefix_rows else 0,
                WINDOWED=window is not None, SINKS=sinks is not None, E4M3_PAGES=is_e4m3,
                WHICH_SPLITS=which, num_warps=load.num_warps, num_stages=load.num_stages,
                **pdl_options(q.device) if use_pdl else {"USE_PDL": False},
            )  # fmt: skip
    return out


def decode_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: DecodeRows,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KVScales = UNIT_KV_SCALES,
) -> torch.Tensor:
    """`decode_attention` in plain torch, row by row in float32: [R, heads, dim]."""
    group = q.shape[1] // k.shape[2]
    found = []
    for row, length in enumerate(rows.seq_lens.tolist()):
        pages = rows.kv_indices[int(rows.kv_indptr[row]) :][: -(-length // k.shape[1])].long()
        begin = 0 if window is None else max(length - window, 0)
        keys, values = (
            (cache[pages].flatten(0, 1)[begin:length].float() * one).repeat_interleave(group, dim=1)
            for cache, one in ((k, scales.k), (v, scales.v))
        )
        scores = torch.einsum("hd,thd->ht", q[row].float(), keys) * scale
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None]), dim=1)
        weights = scores.softmax(-1)[:, : len(keys)]
        found.append(torch.einsum("ht,thd->hd", weights, values))
    return torch.stack(found).to(q.dtype)

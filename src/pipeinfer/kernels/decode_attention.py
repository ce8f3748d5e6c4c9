"""Attention of one query a row over paged keys and values, long rows in several pieces at once.

One launch a layer, and nothing to plan on the host: how rows are cut is found out on the device.
Keys and values that rows begin with in common are read once for several of them. Needs triton.
Knows rows and pages; no request and no graph. Sources: https://arxiv.org/abs/2205.14135
(the running softmax), https://pytorch.org/blog/flash-decoding (pieces of a row that are merged).
"""

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.decode_splits import (
    MERGE_WORDS,
    SPLIT_COUNT_UNIT,
    SPLIT_WORDS,
    DecodeConfig,
    DecodePrefixes,
    max_prefix_splits,
    max_total_splits,
)
from pipeinfer.kernels.formats import E4M3, UNIT_KV_SCALES, KVScales
from pipeinfer.kernels.triton_support import (
    L2_LINE_ELEMENTS,
    as_int16_pairs,
    e4m3_pairs_to_fp16,
    pdl_options,
    prefetch_l2,
)

MIN_QUERY_ROWS = 16  # query rows that tensor cores multiply at least
LOG2E = math.log2(math.e)
# Which pieces a launch works off. Launched after each other on a stream, those of runs first, the
# second begins while the first still ends, and ends after it.
ALL_SPLITS, PREFIX_SPLITS, ROW_SPLITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class DecodeRows:
    """R rows with one query each, int32. lengths [R]: their keys; a row may have none. indptr
    [R or more]: where a row's pages begin in `indices`. pieces: of the rows (decode_pieces.py).
    runs: what the rows have in common, if anything is to be shared.
    """

    seq_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    splits: torch.Tensor
    prefixes: DecodePrefixes | None = None


@triton.jit
def _load_pages(kv_indices, first, at, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens at, at + 1 ...: at_split page if a block lies in at_split, else [BLOCK]; any for those
    past `stop`."""
    token = at if PAGE % BLOCK == 0 else at + tl.arange(0, BLOCK)
    return tl.load(kv_indices + first + token // PAGE, mask=token < stop, other=0)


@triton.jit
def _token_offsets(page, at, page_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK]: where the keys of those tokens lie, from the pool's begin."""
    offset = (at + tl.arange(0, BLOCK)) % PAGE
    return page.to(tl.int64) * page_stride + offset * token_stride


@triton.jit
def _attend_split(
    q, odd, k, v, kv_indices, first, start, stop, window_start, scale, page_stride, token_stride,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, QUERY_ROWS: tl.constexpr,
    WINDOWED: tl.constexpr, WHOLE_BLOCKS: tl.constexpr, E4M3_PAGES: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """(max_of_all score, sum of weights, weighted sum [QUERY_ROWS, DIM]) over tokens start .. stop - 1,
    without those before `window_start`. WHOLE_BLOCKS: they are sum_of_all blocks. q, odd: see _load_queries."""
    COLUMNS: tl.constexpr = DIM // 2 if E4M3_PAGES else DIM
    column = tl.arange(0, COLUMNS)
    max_score = tl.full((QUERY_ROWS,), float("-inf"), tl.float32)
    sum_exp = tl.zeros((QUERY_ROWS,), tl.float32)
    acc = tl.zeros((QUERY_ROWS, COLUMNS), tl.float32)
    odd_sums = acc
    page = _load_pages(kv_indices, first, start, stop, PAGE, BLOCK)
    for at in range(start, stop, BLOCK):
        following = _load_pages(kv_indices, first, at + BLOCK, stop, PAGE, BLOCK)
        element = _token_offsets(page, at, page_stride, token_stride, PAGE, BLOCK)
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
    """Of queries and keys, float32 [QUERY_ROWS, tokens]."""
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
    """Queries [QUERY_ROWS, DIM] that begin `at`, as they are multiplied, and what is left of `scale` for
    their scores. E4M3_PAGES: their even numbers and their odd ones, since keys come in pairs. Either
    way there are two, of which the second counts only then.

    Numbers of 8 bits become e4m3_pairs_to_fp16 in at_split instruction, bfloat16 in four, and either holds them
    exactly; queries in bfloat16 are scaled before, so that they have room.
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
    """The weight of a key without a value, whose score stands `at`, beside a max_of_all score."""
    return tl.exp2(tl.load(at).to(tl.float32) * 1.4426950408889634 - max_score)


@triton.jit
def _merge_row(
    out, partial_out, partial_max_sum, sinks, first, splits, head, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, MAX_SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The splits of at_split row and KV head, out of what their programs left, into `out`."""
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
    """Of the first `count` splits of each query, which lie `stride` apart from `at` on."""
    index = tl.arange(0, MAX_SPLITS)
    places = partial_max_sum + 2 * (at[:, None] + index[None, :] * stride)
    there = index[None, :] < count[:, None]
    return tl.max(tl.load(places, mask=there, other=float("-inf"), cache_modifier=".cg"), axis=1)


@triton.jit
def _accumulate_splits(
    partial_out, partial_max_sum, at, stride, count, max_of_all, sum_of_all, value, dim,
    DIM: tl.constexpr,
):  # fmt: skip
    """`sum_of_all` and `value`, whose columns are `dim`, with those splits, in their order; four are
    read at a time."""
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
    """Of each `wanted` pair of row and query head its own_splits splits, and then those of its run. Pairs
    are computed alike, whoever merges them: at_split row here, or all that share a split."""
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
    """Program (KV head, split). The last of a row's splits that ends merges all.

    E4M3_PAGES: pages hold pairs of e4m3, values to be multiplied by v_scale; `scale` has that of the
    keys.
    PREFIX_QUERIES: queries that a split of a run is for; 0: prefix_rows have no runs. WHICH_SPLITS: which are this
    launch's. Where they are early, that of the runs has waited for the kernel before in full, and
    that of the prefix_rows waits for it when it ends: so what comes next waits for both.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    COLUMNS: tl.constexpr = DIM // 2 if E4M3_PAGES else DIM
    of_head = head * COLUMNS  # in pages
    words = splits + split * SPLIT_WORDS
    row = tl.load(words).to(tl.int64)
    prefix_rows = tl.load(words + 5) if PREFIX_QUERIES > 0 else 0
    other = row < 0
    if WHICH_SPLITS == PREFIX_SPLITS:
        other = other | (prefix_rows == 0)
    elif WHICH_SPLITS == ROW_SPLITS:
        other = other | (prefix_rows > 0)
    if other:
        # Some program of such a launch must have waited, even if nothing is to be done.
        if USE_PDL and WHICH_SPLITS != ALL_SPLITS and split == tl.num_programs(1) - 1:
            gdc_wait()
        return
    start, stop, first_and_count = tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    begin = tl.load(kv_indptr + row)
    window_start = tl.load(seq_lens + row) - window if WINDOWED else 0
    if USE_PDL:
        if WHICH_SPLITS != ROW_SPLITS:
            page = _load_pages(kv_indices, begin, start, stop, PAGE, BLOCK)
            element = _token_offsets(page, start, page_stride, token_stride, PAGE, BLOCK)
            _prefetch_keys_values(k + of_head, v + of_head, element, COLUMNS)
            gdc_wait()  # for the query, and for the key and value of this step
        gdc_launch_dependents()
    # What a launch has not waited for itself is read past the nearest cache.
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
    """A split of a run, for the queries of its first `prefix_rows` members, side by side. k, v: of the
    head."""
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
    """What a split found, for the program that merges its row."""
    tl.store(sums_at, acc, mask=real[:, None])
    tl.store(scales_at, max_score, mask=real)
    tl.store(scales_at + 1, sum_exp, mask=real)
    tl.debug_barrier()  # what all threads have written, before at_split of them says so


@triton.jit
def _prefetch_keys_values(k, v, element, COLUMNS: tl.constexpr):
    """Asks for the first keys and values, all but the newest of which are there for long."""
    LINES: tl.constexpr = (COLUMNS + L2_LINE_ELEMENTS - 1) // L2_LINE_ELEMENTS
    line = tl.arange(0, LINES) * L2_LINE_ELEMENTS
    prefetch_l2(k + element[:, None] + line[None, :])
    prefetch_l2(v + element[:, None] + line[None, :])


class DecodeWorkspace:
    """What pieces of rows leave for each other: for launches of at most so many rows and pieces.
    tile: queries of a piece that several rows share, of which there are at most `runs`.
    """

    def __init__(
        self,
        rows: int,
        pieces: int,
        heads: tuple[int, int, int],
        device: torch.device,
        runs: int = 0,
        tile: int = 0,
    ) -> None:
        """heads: query heads, KV heads, and the size of either."""
        queries, kv_heads, dim = heads
        shared = runs * kv_heads * tile
        self.partial_out = torch.empty(pieces * queries * dim, device=device)
        self.partial_max_sum = torch.empty(pieces * queries * 2, device=device)
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
    """softmax(q k^T * scale) v of each row's last token: `out` [R, heads, dim], which is returned.

    q as out, rows may be strided. k, v [pages, page_size, kv_heads, dim] alike; dim a power of two,
    in e4m3 of at least 32.
    Nothing is written for a row without keys. window: keys that a query sees, its own included; the
    rows' pieces were cut with the same, and with the same runs, so many of which share a piece as
    the cut has seats. early: nothing that the kernel before writes is read before it has ended,
    but for its pieces: False right after they were cut. sinks [heads]: each head's score of a key
    without a value, that every query sees. scales: of k and v in e4m3, which are multiplied as
    e4m3_pairs_to_fp16 where q is bfloat16. float32 inside.
    """
    (count, heads, dim), (page_size, kv_heads) = q.shape, k.shape[1:3]
    k, v, narrow = as_int16_pairs(k), as_int16_pairs(v), k.dtype == E4M3
    if count:
        group, runs = heads // kv_heads, rows.prefixes
        seats = 0 if runs is None else config.rows_per_prefix_tile(group)
        pieces = max_total_splits(count, config, seats)
        launches = [(ALL_SPLITS, pieces, config.load)]
        if seats and config.prefix_load is not None:
            runs_alone = max_prefix_splits(count, config, seats)
            launches = [
                (PREFIX_SPLITS, runs_alone, config.prefix_load),
                (ROW_SPLITS, pieces, config.load),
            ]
        for which, most, reads in launches:
            _decode_attention_kernel[(kv_heads, most)](
                q, k, v, out, workspace.partial_out, workspace.partial_max_sum,
                workspace.prefix_partial_out, workspace.prefix_partial_max_sum, workspace.counters,
                rows.seq_lens, rows.kv_indptr, rows.kv_indices, rows.splits, runs and runs.members,
                runs and runs.merges, sinks, scale * scales.k * LOG2E, scales.v, window or 2**30,
                q.stride(0), k.stride(0), k.stride(1), KV_HEADS=kv_heads, GROUP=group, DIM=dim,
                PAGE=page_size, BLOCK=reads.block_n, MAX_SPLITS=config.max_splits,
                QUERY_ROWS=max(MIN_QUERY_ROWS, triton.next_power_of_2(group)),
                PREFIX_QUERIES=config.prefix_queries if seats else 0, WINDOWED=window is not None,
                SINKS=sinks is not None, E4M3_PAGES=narrow, WHICH_SPLITS=which,
                num_warps=reads.num_warps, num_stages=reads.num_stages,
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
    """The same in plain torch, row by row in float32: [R, heads, dim]."""
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

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
def _pages(indices, first, at, stop, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the tokens at, at + 1 ...: one page if a block lies in one, else [BLOCK]; any for those
    past `stop`."""
    token = at if PAGE % BLOCK == 0 else at + tl.arange(0, BLOCK)
    return tl.load(indices + first + token // PAGE, mask=token < stop, other=0)


@triton.jit
def _elements(page, at, page_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK]: where the keys of those tokens lie, from the pool's begin."""
    offset = (at + tl.arange(0, BLOCK)) % PAGE
    return page.to(tl.int64) * page_stride + offset * token_stride


@triton.jit
def _piece(
    q, odd, k, v, indices, first, start, stop, low, scale, page_stride, token_stride,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, FULL: tl.constexpr, NARROW: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """(greatest score, sum of weights, weighted sum [TILE, DIM]) over tokens start .. stop - 1,
    without those before `low`. FULL: they are whole blocks. q, odd: see _queries."""
    COLUMNS: tl.constexpr = DIM // 2 if NARROW else DIM
    column = tl.arange(0, COLUMNS)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, COLUMNS), tl.float32)
    odd_sums = sums
    page = _pages(indices, first, start, stop, PAGE, BLOCK)
    for at in range(start, stop, BLOCK):
        following = _pages(indices, first, at + BLOCK, stop, PAGE, BLOCK)
        element = _elements(page, at, page_stride, token_stride, PAGE, BLOCK)
        keys_at = k + element[None, :] + column[:, None]
        values_at = v + element[:, None] + column[None, :]
        if FULL:
            scores = _scores(q, odd, tl.load(keys_at, cache_modifier=CACHE), NARROW)
            values = tl.load(values_at, cache_modifier=CACHE)
            higher = tl.maximum(most, tl.max(scores, axis=1) * scale)
            weights = tl.exp2(scores * scale - higher[:, None])  # scaled as they are subtracted
        else:
            token = at + tl.arange(0, BLOCK)
            inside = token < stop
            if WINDOWED:
                inside = inside & (token >= low)
            keys = tl.load(keys_at, mask=inside[None, :], other=0, cache_modifier=CACHE)
            scores = _scores(q, odd, keys, NARROW) * scale
            scores = tl.where(inside[None, :], scores, float("-inf"))
            values = tl.load(values_at, mask=inside[:, None], other=0, cache_modifier=CACHE)
            higher = tl.maximum(most, tl.max(scores, axis=1))
            weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(most - higher)
        total = total * fade + tl.sum(weights, axis=1)
        weights = weights.to(q.dtype)
        if NARROW:
            even_values, odd_values = e4m3_pairs_to_fp16(values)
            sums = tl.dot(weights, even_values.to(q.dtype), sums * fade[:, None],
                          input_precision="ieee")  # fmt: skip
            odd_sums = tl.dot(weights, odd_values.to(q.dtype), odd_sums * fade[:, None],
                              input_precision="ieee")  # fmt: skip
        else:
            sums = tl.dot(weights, values, sums * fade[:, None], input_precision="ieee")
        most, page = higher, following
    if NARROW:
        sums = tl.interleave(sums, odd_sums)
    return most, total, sums


@triton.jit
def _scores(q, odd, keys, NARROW: tl.constexpr):
    """Of queries and keys, float32 [TILE, tokens]."""
    if NARROW:
        even_keys, odd_keys = e4m3_pairs_to_fp16(keys)
        scores = tl.dot(q, even_keys.to(q.dtype), input_precision="ieee")
        scores = tl.dot(odd, odd_keys.to(q.dtype), scores, input_precision="ieee")
    else:
        scores = tl.dot(q, keys, input_precision="ieee")
    return scores


@triton.jit
def _queries(
    at, real, scale, DIM: tl.constexpr, NARROW: tl.constexpr, CACHE: tl.constexpr
):  # fmt: skip
    """Queries [TILE, DIM] that begin `at`, as they are multiplied, and what is left of `scale` for
    their scores. NARROW: their even numbers and their odd ones, since keys come in pairs. Either
    way there are two, of which the second counts only then.

    Numbers of 8 bits become e4m3_pairs_to_fp16 in one instruction, bfloat16 in four, and either holds them
    exactly; queries in bfloat16 are scaled before, so that they have room.
    """
    COLUMNS: tl.constexpr = DIM // 2 if NARROW else DIM
    places = at[:, None] + (tl.arange(0, COLUMNS) * (DIM // COLUMNS))[None, :]
    queries = tl.load(places, mask=real[:, None], other=0.0, cache_modifier=CACHE)
    odd = queries
    if NARROW:
        odd = tl.load(places + 1, mask=real[:, None], other=0.0, cache_modifier=CACHE)
    if NARROW and queries.dtype == tl.bfloat16:
        queries = (queries.to(tl.float32) * scale).to(tl.float16)
        odd = (odd.to(tl.float32) * scale).to(tl.float16)
        scale = 1.0
    return queries, odd, scale


@triton.jit
def _sink(at, most):
    """The weight of a key without a value, whose score stands `at`, beside a greatest score."""
    return tl.exp2(tl.load(at).to(tl.float32) * 1.4426950408889634 - most)


@triton.jit
def _merge(
    out, scratch, scales, sinks, first, splits, head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The pieces of one row and KV head, out of what their programs left, into `out`."""
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    there = split < splits
    for query in tl.static_range(GROUP):
        at = ((first + split) * KV_HEADS + head) * GROUP + query
        most = tl.load(scales + 2 * at, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(scales + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
        greatest = tl.max(most, axis=0)
        weight = tl.exp2(most - greatest)
        sums = tl.load(scratch + at[:, None] * DIM + dim[None, :], mask=there[:, None], other=0.0,
                       cache_modifier=".cg")  # fmt: skip
        whole = tl.sum(total * weight, axis=0)
        if SINKS:
            whole += _sink(sinks + head * GROUP + query, greatest)
        value = tl.sum(sums * weight[:, None], axis=0) / whole
        tl.store(out + query * DIM + dim, value)


@triton.jit
def _greatest(scales, at, stride, count, SPLITS: tl.constexpr):
    """Of the first `count` pieces of each query, which lie `stride` apart from `at` on."""
    split = tl.arange(0, SPLITS)
    places = scales + 2 * (at[:, None] + split[None, :] * stride)
    there = split[None, :] < count[:, None]
    return tl.max(tl.load(places, mask=there, other=float("-inf"), cache_modifier=".cg"), axis=1)


@triton.jit
def _added(sums, scales, at, stride, count, greatest, whole, value, dim, DIM: tl.constexpr):
    """`whole` and `value`, whose columns are `dim`, with those pieces, in their order; four are
    read at a time."""
    for begin in range(0, tl.max(count, axis=0), 4):
        for step in tl.static_range(4):
            split = begin + step
            there, one = split < count, at + split * stride
            most = tl.load(scales + 2 * one, mask=there, other=float("-inf"), cache_modifier=".cg")
            total = tl.load(scales + 2 * one + 1, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(sums + one[:, None] * DIM + dim[None, :], mask=there[:, None],
                           other=0.0, cache_modifier=".cg")  # fmt: skip
            weight = tl.exp2(most - greatest)
            whole += total * weight
            value += part * weight[:, None]
    return whole, value


@triton.jit
def _merge_shared(
    out, scratch, scales, shared, shared_scales, merges, sinks, row, query, wanted, head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Of each `wanted` pair of row and query head its own pieces, and then those of its run. Pairs
    are computed alike, whoever merges them: one row here, or all that share a piece."""
    merge = merges + row * MERGE_WORDS
    of_run = tl.load(merge + 3, mask=wanted, other=0)
    own = tl.load(merge, mask=wanted, other=0) - of_run
    at = (tl.load(merge + 1, mask=wanted, other=0) * KV_HEADS + head) * GROUP + query
    seat = tl.load(merge + 4, mask=wanted, other=0) * GROUP + query
    at_run = (tl.load(merge + 2, mask=wanted, other=0) * KV_HEADS + head) * TILE + seat
    greatest = _greatest(scales, at, KV_HEADS * GROUP, own, SPLITS)
    in_run = _greatest(shared_scales, at_run, KV_HEADS * TILE, of_run, SPLITS)
    greatest = tl.where(wanted, tl.maximum(greatest, in_run), 0.0)
    place = out + ((row * KV_HEADS + head) * GROUP + query)[:, None] * DIM
    # As many columns at a time as there are registers for.
    COLUMNS: tl.constexpr = min(DIM, 2048 // query.shape[0])
    for part in tl.static_range(DIM // COLUMNS):
        dim = part * COLUMNS + tl.arange(0, COLUMNS)
        whole = tl.zeros_like(greatest)
        value = tl.zeros((query.shape[0], COLUMNS), tl.float32)
        whole, value = _added(scratch, scales, at, KV_HEADS * GROUP, own, greatest, whole, value,
                              dim, DIM)  # fmt: skip
        whole, value = _added(shared, shared_scales, at_run, KV_HEADS * TILE, of_run, greatest,
                              whole, value, dim, DIM)  # fmt: skip
        if SINKS:
            whole += _sink(sinks + head * GROUP + query, greatest)
        tl.store(place + dim[None, :], value / whole[:, None], mask=wanted[:, None])


@triton.jit
def _attend(
    q, k, v, out, scratch, scales, shared, shared_scales, arrived, lengths, indptr, indices, pieces,
    members, merges, sinks, scale, v_scale, window, q_stride, page_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, SHARED: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, NARROW: tl.constexpr, EARLY: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Program (KV head, piece). The last of a row's pieces that ends merges all.

    NARROW: pages hold pairs of e4m3, values to be multiplied by v_scale; `scale` has that of the
    keys.
    SHARED: queries that a piece of a run is for; 0: rows have no runs. PIECES: which are this
    launch's. Where they are early, that of the runs has waited for the kernel before in full, and
    that of the rows waits for it when it ends: so what comes next waits for both.
    """
    head, piece = tl.program_id(0), tl.program_id(1)
    COLUMNS: tl.constexpr = DIM // 2 if NARROW else DIM
    of_head = head * COLUMNS  # in pages
    words = pieces + piece * SPLIT_WORDS
    row = tl.load(words).to(tl.int64)
    rows = tl.load(words + 5) if SHARED > 0 else 0
    other = row < 0
    if PIECES == PREFIX_SPLITS:
        other = other | (rows == 0)
    elif PIECES == ROW_SPLITS:
        other = other | (rows > 0)
    if other:
        # Some program of such a launch must have waited, even if nothing is to be done.
        if EARLY and PIECES != ALL_SPLITS and piece == tl.num_programs(1) - 1:
            gdc_wait()
        return
    start, stop, cut = tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    begin = tl.load(indptr + row)
    low = tl.load(lengths + row) - window if WINDOWED else 0
    if EARLY:
        if PIECES != ROW_SPLITS:
            page = _pages(indices, begin, start, stop, PAGE, BLOCK)
            element = _elements(page, start, page_stride, token_stride, PAGE, BLOCK)
            _ahead(k + of_head, v + of_head, element, COLUMNS)
            gdc_wait()  # for the query, and for the key and value of this step
        gdc_launch_dependents()
    # What a launch has not waited for itself is read past the nearest cache.
    CACHE: tl.constexpr = ".cg" if EARLY and PIECES == ROW_SPLITS else ""
    if PIECES == ALL_SPLITS and SHARED > 0:
        of_run = rows > 0
    else:
        of_run: tl.constexpr = PIECES == PREFIX_SPLITS
    if of_run:
        _of_run(q, k + of_head, v + of_head, out, scratch, scales, shared, shared_scales, arrived,
                indices, members + tl.load(words + 4), merges, sinks, head, piece, rows, begin,
                start, stop, scale, v_scale, q_stride, page_stride, token_stride, KV_HEADS, GROUP,
                DIM, PAGE, BLOCK, SPLITS, SHARED, SINKS, NARROW)  # fmt: skip
    else:
        dim, query = tl.arange(0, DIM), tl.arange(0, TILE)
        heads, real = (head * GROUP + query)[:, None] * DIM + dim[None, :], query < GROUP
        first, every = cut % SPLIT_COUNT_UNIT, cut // SPLIT_COUNT_UNIT
        if SHARED > 0:
            every = tl.load(merges + row * MERGE_WORDS)
        queries_at = q + row * q_stride + (head * GROUP + query) * DIM
        queries, odd, scale = _queries(queries_at, real, scale, DIM, NARROW, CACHE)
        most, total, sums = _piece(queries, odd, k + of_head, v + of_head, indices, begin, start,
                                   stop, low, scale, page_stride, token_stride, DIM, PAGE, BLOCK,
                                   TILE, WINDOWED, False, NARROW, CACHE)  # fmt: skip
        if NARROW:
            sums *= v_scale
        target = out + row * (KV_HEADS * GROUP * DIM)
        if every == 1:
            if SINKS:
                total += _sink(sinks + head * GROUP + tl.minimum(query, GROUP - 1), most)
            tl.store(target + heads, sums / total[:, None], mask=real[:, None])
        else:
            at = (piece * KV_HEADS + head) * GROUP + query
            _leave(scratch + at[:, None] * DIM + dim[None, :], scales + 2 * at, most, total, sums,
                   real)  # fmt: skip
            counter = arrived + row * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == every - 1:
                tl.store(counter, 0)  # for the next launch
                if SHARED > 0:
                    alone = tl.zeros((TILE,), tl.int64) + row
                    _merge_shared(out, scratch, scales, shared, shared_scales, merges, sinks, alone,
                                  tl.minimum(query, GROUP - 1), real, head, KV_HEADS, GROUP, DIM,
                                  SPLITS, SHARED, SINKS)  # fmt: skip
                else:
                    _merge(target + head * GROUP * DIM, scratch, scales, sinks, first, every, head,
                           KV_HEADS, GROUP, DIM, SPLITS, SINKS)  # fmt: skip
    if EARLY and PIECES == ROW_SPLITS:
        gdc_wait()


@triton.jit
def _of_run(
    q, k, v, out, scratch, scales, shared, shared_scales, arrived, indices, members, merges, sinks,
    head, piece, rows, begin, start, stop, scale, v_scale, q_stride, page_stride, token_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """A piece of a run, for the queries of its first `rows` members, side by side. k, v: of the
    head."""
    dim, query = tl.arange(0, DIM), tl.arange(0, TILE)
    member = query // GROUP
    real = member < rows
    row = tl.load(members + member, mask=real, other=0).to(tl.int64)
    queries_at = q + row * q_stride + (head * GROUP + query % GROUP) * DIM
    queries, odd, scale = _queries(queries_at, real, scale, DIM, NARROW, "")
    most, total, sums = _piece(queries, odd, k, v, indices, begin, start, stop, 0, scale,
                               page_stride, token_stride, DIM, PAGE, BLOCK, TILE, False,
                               PAGE % BLOCK == 0, NARROW, "")  # fmt: skip
    if NARROW:
        sums *= v_scale
    at = (piece * KV_HEADS + head) * TILE + query
    _leave(shared + at[:, None] * DIM + dim[None, :], shared_scales + 2 * at, most, total, sums,
           real)  # fmt: skip
    once = real & (query % GROUP == 0)
    every = tl.load(merges + row * MERGE_WORDS, mask=once, other=0)
    arrivals = tl.atomic_add(arrived + row * KV_HEADS + head, 1, mask=once, sem="acq_rel")
    last = (once & (arrivals == every - 1)).to(tl.int32)
    if tl.sum(last) > 0:
        tl.store(arrived + row * KV_HEADS + head, 0, mask=once & (last > 0))
        same = member[:, None] == member[None, :]
        wanted = real & (tl.sum(tl.where(same, last[None, :], 0), axis=1) > 0)
        _merge_shared(out, scratch, scales, shared, shared_scales, merges, sinks, row,
                      query % GROUP, wanted, head, KV_HEADS, GROUP, DIM, SPLITS, TILE,
                      SINKS)  # fmt: skip


@triton.jit
def _leave(sums_at, scales_at, most, total, sums, real):
    """What a piece found, for the program that merges its row."""
    tl.store(sums_at, sums, mask=real[:, None])
    tl.store(scales_at, most, mask=real)
    tl.store(scales_at + 1, total, mask=real)
    tl.debug_barrier()  # what all threads have written, before one of them says so


@triton.jit
def _ahead(k, v, element, COLUMNS: tl.constexpr):
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
            _attend[(kv_heads, most)](
                q, k, v, out, workspace.partial_out, workspace.partial_max_sum, workspace.prefix_partial_out,
                workspace.prefix_partial_max_sum, workspace.counters, rows.seq_lens, rows.kv_indptr, rows.kv_indices,
                rows.splits, runs and runs.members, runs and runs.merges, sinks,
                scale * scales.k * LOG2E, scales.v, window or 2**30, q.stride(0), k.stride(0),
                k.stride(1), KV_HEADS=kv_heads, GROUP=group, DIM=dim, PAGE=page_size,
                BLOCK=reads.block_n, SPLITS=config.max_splits,
                TILE=max(MIN_QUERY_ROWS, triton.next_power_of_2(group)), SHARED=config.prefix_queries if seats else 0,
                WINDOWED=window is not None, SINKS=sinks is not None, NARROW=narrow, PIECES=which,
                num_warps=reads.num_warps, num_stages=reads.num_stages,
                **(pdl_options(q.device) if use_pdl else {"EARLY": False}),
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

"""Kernels of exact mode: GEMMs and attention whose bits do not depend on how the work is cut.

GEMM: each element of x @ weight.T is one float32 accumulator of a tensor core, to which products
are added in steps of 16 along the depth, from the first to the last, however many rows there are.
On a Hopper the bits are those of any tile, of operands that are swapped, of mma.sync and wgmma
alike, and of a library's GEMM without split-K (tests/gpu/test_exact_kernels.py compares them).

Attention over paged keys and values: the keys of a query are cut into segments at fixed absolute
positions, a segment into blocks. Within a segment, block by block: scores and weighted sums are
chains of a tensor core, as in the GEMM, the sum of the weights is one, too (a product with ones),
and a maximum has no order. Segments are merged from the first to the last. So a query gets the same
bits alone or beside others, as a decode or within a prompt, in any chunk of it, and whether one
program merges its segments in registers or several leave them for the last one of them. What a
query does not see is masked: it adds zeros, which change no sum.

Needs triton. Knows rows, weights and pages; no layer, no request and no graph. tile_configs.py says
which tiles the GEMM has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeinfer.kernels.decode_attention import (
    LOG2E,
    MIN_QUERY_ROWS,
    load_pages,
    token_offsets,
)
from pipeinfer.kernels.tile_configs import ExactGemmConfig, exact_gemm_config
from pipeinfer.kernels.triton_support import (
    L2_LINE_ELEMENTS,
    dot_a_bt,
    pdl_options,
    prefetch_l2,
    zeros_accumulator,
)

# Triton compiles the functions under triton.jit; to a type checker they are not what they seem.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

BLOCK = 64  # keys of a step: another number gives other bits
SEGMENT = 256  # keys that are merged with others as one: another number gives other bits
MAX_PARTIALS = 128  # segments of a row that programs leave for the last one, at most
ONES = tl.constexpr(16)  # columns of the ones that sum weights: the fewest that tensor cores take
# Programs of decodes to aim at, over all rows and KV heads: four for each of 132 multiprocessors.
MIN_PROGRAMS = 528
# Of prompts: queries of all heads of a KV head that a program has, its warps, and the steps in
# flight; of decodes: warps and steps. Bits do not depend on these. By the most bytes of a key.
PREFILL = (256, (128, 8, 3)), (512, (64, 8, 2)), (1024, (64, 8, 1))
DECODE = (512, (4, 3)), (1024, (4, 1))
MIN_PADDED_ROWS = 64  # rows of prompts: fewer numbers of rows are fewer compilations


@dataclass(frozen=True)
class ExactRows:
    """R rows of a step, int32.

    Attributes:
    - seq_lens [R]: keys of each row, those of its queries included; a row may have none
    - kv_indptr [R or more]: where a row's pages begin in kv_indices
    - kv_indices: pages
    - qo_indptr [R + 1]: the first query of each row; None: each row has one
    """

    seq_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    qo_indptr: torch.Tensor | None = None


class ExactWorkspace:
    """Results of the programs of decode rows for the last program of each row. Float32, but for
    counters.

    Attributes:
    - partial_out: [rows, MAX_PARTIALS, heads, dim], weighted sums of values
    - partial_max_sum: [rows, MAX_PARTIALS, heads, 2], greatest score and sum of weights
    - counters: int32 [rows, kv_heads], programs that have ended; zeros between launches
    """

    def __init__(self, rows: int, heads: tuple[int, int, int], device: torch.device) -> None:
        """Allocates the workspace.

        - rows: of a step at most
        - heads: query heads, KV heads, and their size
        """
        num_heads, kv_heads, dim = heads
        split = max((n for n in range(1, rows + 1) if num_programs(n, kv_heads) > 1), default=0)
        partials = split * MAX_PARTIALS * num_heads
        self.partial_out = torch.empty(partials * dim, device=device)
        self.partial_max_sum = torch.empty(partials * 2, device=device)
        self.counters = torch.zeros(max(split * kv_heads, 1), dtype=torch.int32, device=device)


def num_programs(rows: int, kv_heads: int) -> int:
    """Programs of each decode row and KV head."""
    return min(max(MIN_PROGRAMS // (rows * kv_heads), 1), MAX_PARTIALS)


@triton.jit
def _merged(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    """The state of the keys of two states. Each rounding stands here: nothing is contracted."""
    top = tl.maximum(max_a, max_b)
    base = tl.where(top == float("-inf"), 0.0, top)
    left, right = tl.exp2(max_a - base), tl.exp2(max_b - base)
    total = tl.fma(sum_a, left, sum_b * right)
    factor = tl.broadcast_to(left[:, None], acc_a.shape)
    return top, total, tl.fma(acc_a, factor, acc_b * right[:, None])


@triton.jit
def _attend_blocks(
    queries, k, v, kv_indices, first, position, stop, window, scale, page_stride, token_stride,
    begin, end, total_max, total_sum, total_acc, max_score, sum_exp, acc, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Adds blocks begin .. end - 1 of keys to the segment's state (max_score, sum_exp, acc), which
    is added to the total at the end of a segment.

    - position: [QUERIES], of each query
    - stop: the first token without a key
    - MASKED: queries may not see all of these keys
    """
    column, ones = tl.arange(0, DIM), tl.full((BLOCK, ONES), 1.0, queries.dtype)
    page = load_pages(kv_indices, first, begin * BLOCK, stop, PAGE, BLOCK)
    for block in range(begin, end):
        following = load_pages(kv_indices, first, (block + 1) * BLOCK, stop, PAGE, BLOCK)
        token = block * BLOCK + tl.arange(0, BLOCK)
        element = token_offsets(page, block * BLOCK, page_stride, token_stride, PAGE, BLOCK)
        keys_at = k + element[None, :] + column[:, None]
        values_at = v + element[:, None] + column[None, :]
        if MASKED:
            keys = tl.load(keys_at, mask=(token < stop)[None, :], other=0.0)
            values = tl.load(values_at, mask=(token < stop)[:, None], other=0.0)
            seen = token[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.dot(queries, keys, input_precision="ieee")
            scores = tl.where(seen, scores, float("-inf"))
        else:
            keys, values = tl.load(keys_at), tl.load(values_at)
            scores = tl.dot(queries, keys, input_precision="ieee")
        top = tl.maximum(max_score, tl.max(scores, axis=1) * scale)
        base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        negative = tl.broadcast_to(-base[:, None], scores.shape)
        weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, negative))
        rescale = tl.exp2(max_score - base)
        weights = weights.to(queries.dtype)
        sum_exp = tl.dot(weights, ones, sum_exp * rescale[:, None], input_precision="ieee")
        acc = tl.dot(weights, values, acc * rescale[:, None], input_precision="ieee")
        max_score, page = top, following
        if (block + 1) % (SEGMENT // BLOCK) == 0:
            total_max, total_sum, total_acc = _merged(
                total_max, total_sum, total_acc, max_score, tl.max(sum_exp, axis=1), acc
            )
            max_score = tl.full(max_score.shape, float("-inf"), tl.float32)
            sum_exp, acc = tl.zeros_like(sum_exp), tl.zeros_like(acc)
    return total_max, total_sum, total_acc, max_score, sum_exp, acc


@triton.jit
def _attend(
    queries, k, v, kv_indices, first, position, lowest, stop, window, scale, page_stride,
    token_stride, begin, end, DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr, QUERIES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Returns (greatest score, sum of weights, weighted sum) of blocks begin .. end - 1. lowest:
    the least position of a query.
    """
    total_max = tl.full((QUERIES,), float("-inf"), tl.float32)
    total_sum = tl.zeros((QUERIES,), tl.float32)
    total_acc = tl.zeros((QUERIES, DIM), tl.float32)
    max_score, acc = total_max, total_acc
    sum_exp = tl.zeros((QUERIES, ONES), tl.float32)
    masked = begin
    if not WINDOWED:
        masked = tl.maximum(tl.minimum((lowest + 1) // BLOCK, end), begin)
        total_max, total_sum, total_acc, max_score, sum_exp, acc = _attend_blocks(
            queries, k, v, kv_indices, first, position, stop, window, scale, page_stride,
            token_stride, begin, masked, total_max, total_sum, total_acc, max_score, sum_exp, acc,
            DIM, PAGE, BLOCK, SEGMENT, False, False,
        )  # fmt: skip
    total_max, total_sum, total_acc, max_score, sum_exp, acc = _attend_blocks(
        queries, k, v, kv_indices, first, position, stop, window, scale, page_stride, token_stride,
        masked, end, total_max, total_sum, total_acc, max_score, sum_exp, acc, DIM, PAGE, BLOCK,
        SEGMENT, True, WINDOWED,
    )  # fmt: skip
    return _merged(total_max, total_sum, total_acc, max_score, tl.max(sum_exp, axis=1), acc)


@triton.jit
def _divided(acc, sum_exp, max_score, sinks, head, SINKS: tl.constexpr, LOG2E: tl.constexpr):
    """The result [QUERIES, DIM]. head: [QUERIES], the head of each query."""
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        sum_exp += tl.exp2(tl.fma(sink, tl.full(sink.shape, LOG2E, tl.float32), -max_score))
    return acc / sum_exp[:, None]


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["qo_indptr", "seq_lens", "kv_indptr"],
)
def _exact_prefill_kernel(
    q, k, v, out, qo_indptr, seq_lens, kv_indptr, kv_indices, sinks, rows, scale, window, q_stride,
    page_stride, token_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, LOG2E: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (KV head, tile): QUERIES // GROUP queries of one row with all heads of the KV head.
    Tiles of later rows and queries, which see more keys, come first."""
    if USE_PDL:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    PER_TILE: tl.constexpr = QUERIES // GROUP
    index = tl.arange(0, ROWS)
    ends = tl.load(qo_indptr + index + 1, mask=index < rows, other=0)
    begins = tl.load(qo_indptr + index, mask=index < rows, other=0)
    upto = tl.cumsum(tl.where(index < rows, (ends - begins + PER_TILE - 1) // PER_TILE, 0), 0)
    row = tl.sum((upto <= tile).to(tl.int32))
    if row < rows:
        before = tl.max(tl.where(upto <= tile, upto, 0))
        row_begin, row_end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
        length = tl.load(seq_lens + row)
        first_query = row_begin + (tile - before) * PER_TILE
        query, lane = tl.arange(0, QUERIES) // GROUP, tl.arange(0, QUERIES) % GROUP
        token = first_query + query
        real = (query < PER_TILE) & (token < row_end)
        offset = length - row_end  # position of a query, less its place in q
        lowest = first_query + offset
        highest = tl.minimum(first_query + PER_TILE, row_end) - 1 + offset
        position = tl.minimum(token + offset, highest)
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK if WINDOWED else 0
        of_token = token.to(tl.int64)[:, None]
        column = tl.arange(0, DIM)[None, :]
        of_head = ((head * GROUP + lane) * DIM)[:, None] + column
        queries = tl.load(q + of_token * q_stride + of_head, mask=real[:, None], other=0.0)
        max_score, sum_exp, acc = _attend(
            queries, k + head * DIM, v + head * DIM, kv_indices, tl.load(kv_indptr + row), position,
            lowest, highest + 1, window, scale, page_stride, token_stride, begin,
            highest // BLOCK + 1, DIM, PAGE, BLOCK, SEGMENT, QUERIES, WINDOWED,
        )  # fmt: skip
        result = _divided(acc, sum_exp, max_score, sinks, head * GROUP + lane, SINKS, LOG2E)
        at = out + of_token * (KV_HEADS * GROUP * DIM) + of_head
        tl.store(at, result, mask=real[:, None])


@triton.jit(do_not_specialize_on_alignment=["seq_lens", "kv_indptr"])
def _exact_decode_kernel(
    q, k, v, out, partial_out, partial_max_sum, counters, seq_lens, kv_indptr, kv_indices, sinks,
    scale, window, q_stride, page_stride, token_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
    QUERIES: tl.constexpr, SPLIT: tl.constexpr, MAX_PARTIALS: tl.constexpr,
    WINDOWED: tl.constexpr, SINKS: tl.constexpr, LOG2E: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (KV head, row, part): of n parts each has every n-th partial, which is a segment; the
    first partial is all the earlier segments of a row that has more than MAX_PARTIALS. The row's
    last program to end merges the partials.

    - SPLIT: there are several parts; else one program has all the segments
    """
    if USE_PDL:
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    parts = tl.num_programs(2)
    length = tl.load(seq_lens + row)
    BLOCKS: tl.constexpr = SEGMENT // BLOCK
    position = tl.zeros((QUERIES,), tl.int32) + length - 1
    begin = tl.maximum(length - window, 0) // BLOCK if WINDOWED else 0
    end = (length + BLOCK - 1) // BLOCK
    segments = tl.where(length > 0, (length - 1) // SEGMENT - begin // BLOCKS + 1, 0)
    partials = tl.minimum(segments, MAX_PARTIALS) if SPLIT else tl.minimum(segments, 1)
    if part < partials:
        lane, column = tl.arange(0, QUERIES), tl.arange(0, DIM)[None, :]
        real = lane < GROUP
        of_head = ((head * GROUP + lane) * DIM)[:, None] + column
        queries = tl.load(q + row * q_stride + of_head, mask=real[:, None], other=0.0)
        of_sink = head * GROUP + tl.minimum(lane, GROUP - 1)
        first = tl.load(kv_indptr + row)
        target = out + row * (KV_HEADS * GROUP * DIM) + of_head
        for partial in range(part, partials, parts):
            # In blocks: where the partial's first segment begins, and where its last one ends.
            last = begin // BLOCKS + segments - partials + partial
            partial_begin = tl.maximum(tl.where(partial == 0, begin, last * BLOCKS), begin)
            max_score, sum_exp, acc = _attend(
                queries, k + head * DIM, v + head * DIM, kv_indices, first, position, length - 1,
                length, window, scale, page_stride, token_stride, partial_begin,
                tl.minimum((last + 1) * BLOCKS, end), DIM, PAGE, BLOCK, SEGMENT, QUERIES, WINDOWED,
            )  # fmt: skip
            if partials == 1:
                result = _divided(acc, sum_exp, max_score, sinks, of_sink, SINKS, LOG2E)
                tl.store(target, result, mask=real[:, None])
            else:
                at = ((row * MAX_PARTIALS + partial) * KV_HEADS + head) * GROUP + lane
                tl.store(partial_out + at[:, None] * DIM + column, acc, mask=real[:, None])
                tl.store(partial_max_sum + 2 * at, max_score, mask=real)
                tl.store(partial_max_sum + 2 * at + 1, sum_exp, mask=real)
        if SPLIT and partials > 1:
            tl.debug_barrier()  # all threads have written before one of them counts
            counter = counters + row * KV_HEADS + head
            ended = tl.atomic_add(counter, 1, sem="acq_rel") + 1
            if ended == tl.minimum(partials, parts):
                tl.store(counter, 0)  # for the next launch
                max_score = tl.full((QUERIES,), float("-inf"), tl.float32)
                sum_exp = tl.zeros((QUERIES,), tl.float32)
                acc = tl.zeros((QUERIES, DIM), tl.float32)
                for partial in range(partials):
                    at = ((row * MAX_PARTIALS + partial) * KV_HEADS + head) * GROUP + lane
                    one = tl.load(
                        partial_out + at[:, None] * DIM + column, mask=real[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    its_max = tl.load(
                        partial_max_sum + 2 * at, mask=real, other=0.0, cache_modifier=".cg"
                    )
                    its_sum = tl.load(
                        partial_max_sum + 2 * at + 1, mask=real, other=1.0, cache_modifier=".cg"
                    )
                    max_score, sum_exp, acc = _merged(
                        max_score, sum_exp, acc, its_max, its_sum, one
                    )
                result = _divided(acc, sum_exp, max_score, sinks, of_sink, SINKS, LOG2E)
                tl.store(target, result, mask=real[:, None])


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: ExactRows,
    scale: float,
    out: torch.Tensor,
    workspace: ExactWorkspace,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends, causally, for all queries: writes softmax(q k^T * scale) v into `out`, and returns
    `out`. float32 inside; weights are rounded to q's dtype before they are summed and multiplied
    with values.

    - q: [T, heads, dim]; rows may be strided
    - k, v: [pages, page_size, kv_heads, dim], laid out alike; dim is a power of two of at least 16
    - rows: the rows of the queries; a row's queries belong to the last ones of its keys
    - scale: of scores
    - out: [T, heads, dim], contiguous; rows without keys are not written
    - workspace: for decodes of as many rows
    - window: keys that a query sees, its own included
    - sinks: [heads], attention sinks: a score without a value that every query of the head sees
    """
    (tokens, heads, dim), (page_size, kv_heads) = q.shape, k.shape[1:3]
    count, group = len(rows.seq_lens), heads // kv_heads
    if not tokens or not count:
        return out
    common = dict(
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, PAGE=page_size, BLOCK=BLOCK, SEGMENT=SEGMENT,
        WINDOWED=window is not None, SINKS=sinks is not None, LOG2E=LOG2E, **pdl_options(q.device),
    )  # fmt: skip
    sizes = scale * LOG2E, window or 2**30, q.stride(0), k.stride(0), k.stride(1)
    key_bytes = dim * q.element_size()
    if rows.qo_indptr is None:
        num_warps, num_stages = next(found for most, found in DECODE if key_bytes <= most)
        programs = num_programs(count, kv_heads)
        _exact_decode_kernel[(kv_heads, count, programs)](
            q, k, v, out, workspace.partial_out, workspace.partial_max_sum, workspace.counters,
            rows.seq_lens, rows.kv_indptr, rows.kv_indices, sinks, *sizes, SPLIT=programs > 1,
            QUERIES=max(MIN_QUERY_ROWS, triton.next_power_of_2(group)), MAX_PARTIALS=MAX_PARTIALS,
            num_warps=num_warps, num_stages=num_stages, **common,
        )  # fmt: skip
        return out
    found = (found for most, found in PREFILL if key_bytes <= most)
    queries, num_warps, num_stages = next(found)
    tiles = triton.cdiv(tokens, queries // group) + count
    _exact_prefill_kernel[(kv_heads, tiles)](
        q, k, v, out, rows.qo_indptr, rows.seq_lens, rows.kv_indptr, rows.kv_indices, sinks, count,
        *sizes, QUERIES=queries, ROWS=triton.next_power_of_2(max(count, MIN_PADDED_ROWS)),
        num_warps=num_warps, num_stages=num_stages, **common,
    )  # fmt: skip
    return out


def exact_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: ExactRows,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`exact_attention` in plain torch, query by query in float32: [T, heads, dim]."""
    group, found = q.shape[1] // k.shape[2], torch.zeros_like(q)
    indptr = rows.qo_indptr
    bounds = list(range(len(q) + 1)) if indptr is None else indptr.tolist()
    for row, length in enumerate(rows.seq_lens.tolist()):
        pages = rows.kv_indices[int(rows.kv_indptr[row]) :][: -(-length // k.shape[1])].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
            for cache in (k, v)
        )
        for query in range(bounds[row], bounds[row + 1]):
            last = length - (bounds[row + 1] - 1 - query)
            if last < 1:
                continue
            begin = 0 if window is None else max(last - window, 0)
            scores = torch.einsum("hd,thd->ht", q[query].float(), keys[begin:last]) * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks.float()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : last - begin]
            found[query] = torch.einsum("ht,thd->hd", weights, values[begin:last]).to(q.dtype)
    return found


@triton.jit(do_not_specialize=["rows"])
def _exact_gemm_kernel(
    x, weight, bias, out, rows, N, K, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP_AB: tl.constexpr, WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes one tile of out [rows, N]. Row blocks of one band share columns of the weight in the
    cache.

    - SWAP_AB: weights are the first operand, of which tensor cores take 64 rows at full speed
    - WHOLE_N, WHOLE_K: tiles divide the shape of the weight [N, K]
    """
    program = tl.program_id(0)
    row_blocks = tl.cdiv(rows, BLOCK_M)
    column_blocks = tl.cdiv(N, BLOCK_N)
    band = program // (GROUP_M * column_blocks)
    height = tl.minimum(row_blocks - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * column_blocks)
    row = (band * GROUP_M + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    right = weight + column.to(tl.int64)[:, None] * K + depth[None, :]
    real, there = (row < rows)[:, None], (column < N)[:, None]
    if USE_PDL:
        if WHOLE_N and WHOLE_K:
            lines = tl.arange(0, (BLOCK_K + L2_LINE_ELEMENTS - 1) // L2_LINE_ELEMENTS)
            first = weight + column.to(tl.int64)[:, None] * K
            prefetch_l2(first + (lines * L2_LINE_ELEMENTS)[None, :])
        gdc_wait()  # for all that the kernel before it writes
        gdc_launch_dependents()
    left = x + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    total = zeros_accumulator(BLOCK_M, BLOCK_N, SWAP_AB)
    for begin in range(0, K, BLOCK_K):
        if WHOLE_K:
            a = tl.load(left + begin, mask=real, other=0.0)
            if WHOLE_N:
                w = tl.load(right + begin)
            else:
                w = tl.load(right + begin, mask=there, other=0.0)
        else:  # only zeros are added behind the end, which change no sum
            inside = (begin + depth < K)[None, :]
            a = tl.load(left + begin, mask=real & inside, other=0.0)
            w = tl.load(right + begin, mask=there & inside, other=0.0)
        total = dot_a_bt(a, w, total, SWAP_AB)
    if SWAP_AB:
        total = tl.trans(total)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(at, total, mask=real & (column < N)[None, :])


def exact_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: ExactGemmConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [T, width]: float32 inside, rounded once, the same bits for
    every T.

    - x: [T, depth]; rows may be strided, all else is contiguous
    - weight: [width, depth], of x's dtype
    - bias: [width], added before the result is rounded
    - config: the tile, which bits do not depend on; None: that of tile_configs.py
    - out: [T, width], contiguous; None: it is made, of x's dtype
    """
    (rows, depth), width = x.shape, weight.shape[0]
    if out is None:
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        tile = config or exact_gemm_config(rows, width, depth)
        grid = triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n)
        _exact_gemm_kernel[(grid,)](
            x, weight, bias, out, rows, width, depth, x.stride(0), BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=tile.group_m, SWAP_AB=tile.swap_ab,
            WHOLE_N=width % tile.block_n == 0, WHOLE_K=depth % tile.block_k == 0,
            HAS_BIAS=bias is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
            **pdl_options(x.device),
        )  # fmt: skip
    return out

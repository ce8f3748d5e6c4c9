"""The best of two on Hopper: FlashAttention-3 for prefill rows, a kernel of our own for decodes.

Both read the same pages within one forward pass; everything but attention sees all tokens at once.
Decode rows are cut into pieces on the device: nothing is planned on the host, and one long row
among short ones does not hold up the others. What rows begin with in common is read once for
several of them. Knows rows and pages, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from pipeinfer.attention.fa3_backend import Fa3Kernel
from pipeinfer.attention.interface import PlanInputs, Traits
from pipeinfer.attention.paged import PAGE_SIZES, PREFERRED, PagedKind
from pipeinfer.kernels.decode_attention import (
    MIN_QUERY_ROWS,
    DecodeRows,
    DecodeWorkspace,
    decode_attention,
)
from pipeinfer.kernels.decode_splits import (
    DecodeConfig,
    DecodePrefixes,
    LoadConfig,
    empty_prefix_merges,
    empty_splits,
    max_prefix_splits,
    max_total_splits,
    split_rows,
)
from pipeinfer.kernels.formats import E4M3
from pipeinfer.memory.kv_pool import KVPool
from pipeinfer.step import AttentionShape

# By the number of programs that rows and KV heads make: measured on an H200. Few rows are cut
# small, so that all of the GPU works for them; more are cut only where they are long. What many
# rows begin with in common is for two warp groups a multiprocessor (RUNS, of all KV heads).
TILE_CONFIGS = (
    (32, DecodeConfig(64, 32, 64, LoadConfig(block_n=32, num_warps=2, num_stages=3))),
    (64, DecodeConfig(128, 32, 128, LoadConfig(block_n=32, num_warps=1, num_stages=4))),
    (
        384,
        DecodeConfig(
            128, 32, 256, LoadConfig(block_n=32, num_warps=2, num_stages=3), prefix_queries=32
        ),
    ),
)
MANY = DecodeConfig(
    128,
    32,
    1024,
    LoadConfig(block_n=32, num_warps=2, num_stages=3),
    prefix_queries=32,
    min_prefix_tokens=256,
)
OF_RUNS, RUNS = LoadConfig(block_n=64, num_warps=4, num_stages=3), 256
MEASURED_DIM = 128  # the largest head for which that was
# Many rows with few KV heads, as ranks have, are not more programs than a GPU runs at once: then it
# waits for the longest. Programs that read more at a time take turns. Measured on an H100.
FEW_HEADS, OF_FEW_HEADS = 4, LoadConfig(block_n=64, num_warps=4, num_stages=3)


@dataclass(frozen=True)
class DecodePlan:
    """windows: rows of one step, for each length of window that layers have.

    early: launches need not wait for the kernel before to end. Beside prompts they must: programs
    that wait would keep the multiprocessors from a prompt's, which need one each.
    """

    windows: dict[int | None, DecodeRows]
    early: bool


@lru_cache(maxsize=4096)
def tile_config(rows: int, kv_heads: int, dim: int, narrow: bool = False) -> DecodeConfig:
    """How so many rows are cut, with heads of `dim`. narrow: pages hold numbers of 8 bits, of which
    a program with more than a warp reads twice as many tokens at a time: they take 3 % more shared
    memory, and half the steps."""
    found = next((config for most, config in TILE_CONFIGS if rows * kv_heads <= most), MANY)
    reads = found.load
    if narrow and reads.num_warps > 1:
        reads = reads._replace(block_n=2 * reads.block_n)
    elif found is MANY:
        parts = max(RUNS // kv_heads, 1)
        found = replace(
            found,
            prefix_queries=64,
            prefix_load=OF_RUNS,
            extra_prefix_splits=parts,
            min_prefix_tokens=512,
        )
        if kv_heads <= FEW_HEADS and dim <= MEASURED_DIM:
            reads = OF_FEW_HEADS
    if dim <= MEASURED_DIM:
        return replace(found, load=reads)
    # Half the tokens, twice the threads: a program takes the same shared memory and registers, and
    # has none for queries of several rows.
    reads = reads._replace(
        block_n=max(reads.block_n // 2, MIN_QUERY_ROWS), num_warps=2 * reads.num_warps
    )
    return replace(found, load=reads, prefix_queries=0, prefix_load=None)


class TritonDecodeKernel:
    """One query a row, with heads of a power of two of at least 16."""

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        self._device = device
        self._kv_heads = max(shape.num_kv_heads for shape in shapes)
        self._dim = max(shape.head_dim for shape in shapes)
        windows = [shape.sliding_window for shape in shapes]
        # The layers that cut the rows, for themselves and for those with the same window.
        self._first = {windows.index(window): window for window in set(windows)}
        groups = {s.num_heads // s.num_kv_heads for s in shapes if s.sliding_window is None}
        self._group = groups.pop() if len(groups) == 1 else 0  # where rows share what they read

    def bind(self, pool: KVPool, most_rows: int) -> None:
        """Makes room for what pieces of rows leave for each other."""
        self._pool = pool
        sizes = {(s.num_heads, s.num_kv_heads, s.head_dim) for s in self._shapes}
        cuts = [(count, self._tile_config(count)) for count in range(1, most_rows + 1)]
        most = max(max_total_splits(count, how, self._seats(how)) for count, how in cuts)
        runs = max(max_prefix_splits(count, how, self._seats(how)) for count, how in cuts)
        tile = max(how.prefix_queries if self._group else 0 for _, how in cuts)
        self._scratch = {
            size: DecodeWorkspace(most_rows, most, size, self._device, runs, tile) for size in sizes
        }
        self._splits = {window: empty_splits(most, self._device) for window in self._first.values()}
        self._shared_prefixes = empty_prefix_merges(most_rows, self._device)

    def plan(self, inputs: PlanInputs, begin: int, end: int) -> DecodePlan:
        """Views only."""
        step, runs = inputs.step, None
        lengths, indptr = step.seq_lens[begin:end], step.kv_indptr[begin : end + 1]
        leaders, ranks = step.prefix_leaders, step.prefix_ranks
        shares = self._seats(self._tile_config(end - begin)) > 0
        if shares and leaders is not None and ranks is not None:
            runs = DecodePrefixes(leaders[begin:end], ranks[begin:end], *self._shared_prefixes)
        windows = {
            window: DecodeRows(lengths, indptr, step.kv_indices, pieces, None if window else runs)
            for window, pieces in self._splits.items()
        }
        return DecodePlan(windows, early=end == step.shape.rows)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: DecodePlan) -> None:
        shape, pool = self._shapes[layer], self._pool
        size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        window, first = shape.sliding_window, layer in self._first
        rows, how = plan.windows[window], self._tile_config(len(q))
        if first:
            seats, page_size = self._seats(how), pool.page_size
            split_rows(rows.seq_lens, rows.splits, how, window, rows.prefixes, seats, page_size)
        decode_attention(
            q,
            pool.k[layer],
            pool.v[layer],
            rows,
            shape.scale,
            out,
            self._scratch[size],
            how,
            window,
            use_pdl=plan.early and not first,
            sinks=shape.sinks,
            scales=pool.scales[layer],
        )

    def _tile_config(self, rows: int) -> DecodeConfig:
        return tile_config(rows, self._kv_heads, self._dim, self._pool.k[0].dtype == E4M3)

    def _seats(self, how: DecodeConfig) -> int:
        """Rows whose queries share a piece."""
        return how.rows_per_prefix_tile(self._group) if self._group else 0


# All head sizes of this backend (registry.py) are powers of two.
HYBRID = PagedKind(
    TritonDecodeKernel,
    Fa3Kernel,
    Traits(
        PAGE_SIZES,
        PREFERRED,
        captures_decode=True,
        captures_prefill=True,
        block_table="prefills",
        shares=True,
    ),
    at_once=True,
)

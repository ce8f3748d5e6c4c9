"""Attention by Triton kernels of this project, in two backends.

    HYBRID   the best of two on Hopper: FlashAttention-3 for prefill rows, TritonDecodeKernel for
             decodes. Both read the same pages within one forward pass; everything but attention
             sees all tokens at once
    EXACT    exact mode: the same arithmetic for decodes and for prompts, however they are cut;
             kernels/exact.py says why bits do not depend on the step

TritonDecodeKernel splits decode rows on the device: nothing is planned on the host, and one long
row among short ones does not hold up the others. Shared prefixes are read once for several rows.
Knows rows and pages, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from pipeinfer.attention.fa3_backend import Fa3Kernel
from pipeinfer.attention.interface import (
    PAGE_SIZES,
    PREFERRED_PAGE_SIZE,
    AttentionInputs,
    BackendCapabilities,
    KVPool,
    PagedKind,
    qo_indptr_of,
)
from pipeinfer.kernels.decode_attention import (
    MIN_QUERY_ROWS,
    DecodePrefixes,
    DecodeRows,
    DecodeWorkspace,
    decode_attention,
    empty_prefix_merges,
    empty_splits,
    max_prefix_splits,
    max_total_splits,
    split_rows,
)
from pipeinfer.kernels.exact import ExactRows, ExactWorkspace, exact_attention
from pipeinfer.kernels.formats import E4M3
from pipeinfer.kernels.tile_configs import DecodeConfig, LoadConfig
from pipeinfer.step import AttentionShape

# (rows * KV heads at most, how rows are split): measured on an H200. Few rows have small splits, so
# that all of the GPU works for them; more rows are split only where they are long.
TILE_CONFIGS = (
    (
        32,
        DecodeConfig(
            extra_splits=64,
            max_splits=32,
            min_tokens=64,
            load=LoadConfig(block_n=32, num_warps=2, num_stages=3),
        ),
    ),
    (
        64,
        DecodeConfig(
            extra_splits=128,
            max_splits=32,
            min_tokens=128,
            load=LoadConfig(block_n=32, num_warps=1, num_stages=4),
        ),
    ),
    (
        384,
        DecodeConfig(
            extra_splits=128,
            max_splits=32,
            min_tokens=256,
            load=LoadConfig(block_n=32, num_warps=2, num_stages=3),
            prefix_queries=32,
        ),
    ),
)
# For more rows than those.
MANY_ROWS = DecodeConfig(
    extra_splits=128,
    max_splits=32,
    min_tokens=1024,
    load=LoadConfig(block_n=32, num_warps=2, num_stages=3),
    prefix_queries=32,
    min_prefix_tokens=256,
)
# How many rows' shared prefixes are read, in a launch of their own: two warp groups a
# multiprocessor.
PREFIX_LOAD = LoadConfig(block_n=64, num_warps=4, num_stages=3)
# Programs of that launch beside one of each tile, of all KV heads.
PREFIX_PROGRAMS = 256
# The largest head for which all that was measured.
MEASURED_DIM = 128
# Many rows with few KV heads, as ranks have, are not more programs than a GPU runs at once: then it
# waits for the longest. Programs that read more at a time take turns. Measured on an H100.
MAX_FEW_KV_HEADS = 4
FEW_KV_HEADS_LOAD = LoadConfig(block_n=64, num_warps=4, num_stages=3)


@dataclass(frozen=True)
class DecodeMetadata:
    """Rows of one step, for the decode kernel.

    Attributes:
    - windows: rows for each length of window that layers have
    - early: launches need not wait for the kernel before to end. Beside prompts they must: programs
      that wait would keep the multiprocessors from a prompt's, which need one each
    """

    windows: dict[int | None, DecodeRows]
    early: bool


@lru_cache(maxsize=4096)
def tile_config(rows: int, kv_heads: int, dim: int, fp8: bool = False) -> DecodeConfig:
    """Returns how `rows` decode rows are split, with `kv_heads` KV heads of `dim`.

    - fp8: pages hold e4m3. A program with more than a warp then reads twice as many tokens at a
      time: they take 3 % more shared memory, and half the steps
    """
    found = next((config for most, config in TILE_CONFIGS if rows * kv_heads <= most), MANY_ROWS)
    load = found.load
    if fp8 and load.num_warps > 1:
        load = load._replace(block_n=2 * load.block_n)
    elif found is MANY_ROWS:
        found = replace(
            found,
            prefix_queries=64,
            prefix_load=PREFIX_LOAD,
            extra_prefix_splits=max(PREFIX_PROGRAMS // kv_heads, 1),
            min_prefix_tokens=512,
        )
        if kv_heads <= MAX_FEW_KV_HEADS and dim <= MEASURED_DIM:
            load = FEW_KV_HEADS_LOAD
    if dim <= MEASURED_DIM:
        return replace(found, load=load)
    # Half the tokens, twice the threads: a program takes the same shared memory and registers, and
    # has none for queries of several rows.
    load = load._replace(
        block_n=max(load.block_n // 2, MIN_QUERY_ROWS), num_warps=2 * load.num_warps
    )
    return replace(found, load=load, prefix_queries=0, prefix_load=None)


class TritonDecodeKernel:
    """The PagedKernel of decode rows: one query a row, with heads of a power of two of at least
    16.
    """

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        self._device = device
        self._kv_heads = max(shape.num_kv_heads for shape in shapes)
        self._dim = max(shape.head_dim for shape in shapes)
        windows = [shape.sliding_window for shape in shapes]
        # The layers that split the rows, for themselves and for those with the same window.
        self._first = {windows.index(window): window for window in set(windows)}
        ratios = {s.num_heads // s.num_kv_heads for s in shapes if s.sliding_window is None}
        self._queries_per_kv_head = (
            ratios.pop() if len(ratios) == 1 else 0
        )  # for rows with shared prefixes

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """Sets the pool, and allocates the partial results of the splits of a row, for steps of
        `max_rows` rows.
        """
        self._pool = pool
        sizes = {(s.num_heads, s.num_kv_heads, s.head_dim) for s in self._shapes}
        configs = [(rows, self._tile_config(rows)) for rows in range(1, max_rows + 1)]
        splits = max(max_total_splits(rows, c, self._prefix_rows(c)) for rows, c in configs)
        prefixes = max(max_prefix_splits(rows, c, self._prefix_rows(c)) for rows, c in configs)
        queries = max(c.prefix_queries if self._queries_per_kv_head else 0 for _, c in configs)
        self._workspaces = {
            size: DecodeWorkspace(max_rows, splits, size, self._device, prefixes, queries)
            for size in sizes
        }
        self._splits = {
            window: empty_splits(splits, self._device) for window in self._first.values()
        }
        self._prefix_merges = empty_prefix_merges(max_rows, self._device)

    def build_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> DecodeMetadata:
        """Returns views of the step's arrays."""
        step, prefixes = inputs.step, None
        seq_lens, kv_indptr = step.seq_lens[begin:end], step.kv_indptr[begin : end + 1]
        leaders, ranks = step.prefix_leaders, step.prefix_ranks
        reads_once = self._prefix_rows(self._tile_config(end - begin)) > 0
        if reads_once and leaders is not None and ranks is not None:
            prefixes = DecodePrefixes(leaders[begin:end], ranks[begin:end], *self._prefix_merges)
        windows = {
            window: DecodeRows(
                seq_lens, kv_indptr, step.kv_indices, splits, None if window else prefixes
            )
            for window, splits in self._splits.items()
        }
        return DecodeMetadata(windows, early=end == step.shape.num_rows)

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: DecodeMetadata) -> None:
        """Attends, see PagedKernel.run."""
        shape, pool = self._shapes[layer], self._pool
        size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        window, first = shape.sliding_window, layer in self._first
        rows, config = metadata.windows[window], self._tile_config(len(q))
        if first:
            prefix_rows, page_size = self._prefix_rows(config), pool.page_size
            split_rows(
                rows.seq_lens, rows.splits, config, window, rows.prefixes, prefix_rows, page_size
            )
        decode_attention(
            q,
            pool.k[layer],
            pool.v[layer],
            rows,
            shape.scale,
            out,
            self._workspaces[size],
            config,
            window,
            use_pdl=metadata.early and not first,
            sinks=shape.sinks,
            scales=pool.scales[layer],
        )

    def _tile_config(self, rows: int) -> DecodeConfig:
        return tile_config(rows, self._kv_heads, self._dim, self._pool.k[0].dtype == E4M3)

    def _prefix_rows(self, config: DecodeConfig) -> int:
        """Rows whose queries a split of a shared prefix serves; 0: prefixes are not shared."""
        return (
            config.rows_per_prefix_tile(self._queries_per_kv_head)
            if self._queries_per_kv_head
            else 0
        )


# All head sizes of this backend (registry.py) are powers of two.
HYBRID = PagedKind(
    TritonDecodeKernel,
    Fa3Kernel,
    BackendCapabilities(
        PAGE_SIZES,
        PREFERRED_PAGE_SIZE,
        captures_decode=True,
        captures_prefill=True,
        page_table="prefills",
        shares=True,
    ),
    at_once=True,
)


class ExactKernel:
    """Decode rows and prefill rows, with heads of a power of two of at least 16. Nothing is shared
    between rows: the keys of a prefix that several have are read once for each."""

    def __init__(self, shapes: Sequence[AttentionShape], device: torch.device) -> None:
        self._shapes = tuple(shapes)
        self._device = device
        self._workspaces: dict[tuple[int, int, int], ExactWorkspace] = {}
        self._rows = 0  # rows that the workspaces are for

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """Sets the pool, and allocates the partial results of programs, for steps of `max_rows`
        rows.
        """
        self._pool = pool
        if max_rows != self._rows:  # the pool is bound again when its size is known
            sizes = {_heads(shape) for shape in self._shapes}
            self._workspaces = {one: ExactWorkspace(max_rows, one, self._device) for one in sizes}
            self._rows = max_rows

    def build_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> ExactRows:
        """Returns views of the step's arrays."""
        step = inputs.step
        decodes = end <= step.shape.num_decodes
        return ExactRows(
            step.seq_lens[begin:end],
            step.kv_indptr[begin : end + 1],
            step.kv_indices,
            None if decodes else qo_indptr_of(step, begin, end),
        )

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: ExactRows) -> None:
        """Attends, see PagedKernel.run."""
        shape, pool = self._shapes[layer], self._pool
        exact_attention(
            q,
            pool.k[layer],
            pool.v[layer],
            metadata,
            shape.scale,
            out,
            self._workspaces[_heads(shape)],
            shape.sliding_window,
            shape.sinks,
        )


def _heads(shape: AttentionShape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim


# Kernels read lengths and pages on the device: the plan of a graph holds for every step.
EXACT = PagedKind(
    ExactKernel,
    ExactKernel,
    BackendCapabilities(
        PAGE_SIZES, PREFERRED_PAGE_SIZE, captures_decode=True, captures_prefill=True
    ),
    at_once=True,
)

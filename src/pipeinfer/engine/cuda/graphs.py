"""Decode steps as CUDA graphs: a ladder of batch sizes, captured largest first in one pool.

A graph holds the whole step: it takes ids from last_token, computes, samples by temperature and
writes last_token. It reads fixed addresses only, which the forward stream fills before a replay.
Knows no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from pipeinfer.attention.paged import PagedPlan, RowArrays
from pipeinfer.engine.cuda.layout import Layout, Sizes

FIRST = (1, 2, 4)  # then every multiple of 8
STEP = 8
SMALL = 8
REPLAYS = 8
TRIES = 2  # forward passes before the capture: lazy initialisation must not be captured


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes up to `most`, itself included: 1, 2, 4, 8, 16, 24 ..."""
    if most <= 0:
        return ()
    sizes = {size for size in (*FIRST, *range(STEP, most + 1, STEP)) if size < most}
    return tuple(sorted(sizes | {most}))


@dataclass(frozen=True)
class Captured:
    """One size: the graph, and what it leaves behind until the next replay of any size."""

    graph: torch.cuda.CUDAGraph
    layout: Layout
    views: dict[str, torch.Tensor]
    logits: torch.Tensor
    ids: torch.Tensor


# (plan, views) -> (logits [B, vocab], ids [B]): the step that is captured.
Body = Callable[[PagedPlan, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


def decode_layout(size: int, most_pages: int, table: bool) -> Layout:
    """Where a decode step of `size` rows lies; pages either as `table` or as flat indices."""
    pages = most_pages if table else 0
    return Layout(Sizes(size, size, size, pages, 0 if table else size * most_pages))


def row_arrays(views: dict[str, torch.Tensor], rows: int) -> RowArrays:
    """The arrays of a step's rows out of its views, on whichever side they are."""
    return RowArrays(
        lengths=views["lengths"],
        last_page=views["last_page"],
        q_indptr=views["q_indptr"],
        prefill_indptr=views["prefill_indptr"],
        kv_indptr=views["kv_indptr"],
        indices=views["indices"],
        table=views["table"].view(rows, -1) if len(views["table"]) else views["table"],
    )


class DecodeGraphs:
    """All sizes. `words`: the fixed int32 buffer that every graph reads."""

    def __init__(
        self, sizes: tuple[int, ...], most_pages: int, table: bool, device: torch.device
    ) -> None:
        self.sizes = sizes
        self._layouts = {size: decode_layout(size, most_pages, table) for size in sizes}
        most = max((layout.words for layout in self._layouts.values()), default=0)
        self.words = torch.zeros(most, dtype=torch.int32, device=device)
        self._captured: dict[int, Captured] = {}

    def fitting(self, rows: int) -> int | None:
        """The smallest captured size for that many rows; None if there is none."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) and self.sizes[at] in self._captured else None

    def layout(self, size: int) -> Layout:
        """Where a step of that size lies in the buffer."""
        return self._layouts[size]

    def drop_slower_small_ones(self, prepare: Callable[[int], PagedPlan]) -> None:
        """Forgets small sizes that take longer than the next one: for very few rows, libraries'
        matrix kernels are not always faster. After `capture`, on its stream, with its `prepare`.
        """
        small = [size for size in self.sizes if size <= SMALL]
        seconds = {}
        for size in small:
            prepare(size)  # every size reads the buffer in its own way
            seconds[size] = self._replay_seconds(size)
        for size, larger in reversed(list(pairwise(small))):
            best = min(seconds[other] for other in small if other >= larger)
            if seconds[size] > best:
                del self._captured[size]
        self.sizes = tuple(size for size in self.sizes if size in self._captured)

    def _replay_seconds(self, size: int) -> float:
        """The shortest of a few replays of whatever `words` says: enough to compare sizes."""
        graph, times = self._captured[size].graph, []
        for _ in range(REPLAYS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended))
        return min(times)

    def __getitem__(self, size: int) -> Captured:
        return self._captured[size]

    def capture(
        self,
        prepare: Callable[[int], PagedPlan],
        body: Body,
        stream: torch.cuda.Stream,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Captures every size on `stream`, which is current. prepare(size) fills `words` with a
        step of padding rows and plans it. progress(done, total).
        """
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(self.sizes, reverse=True)):
            layout = self._layouts[size]
            views = layout.tensors(self.words)
            plan = prepare(size)
            for _ in range(TRIES):
                body(plan, views)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits, ids = body(plan, views)
            self._captured[size] = Captured(graph, layout, views, logits, ids)
            if progress is not None:
                progress(done + 1, len(self.sizes))
        torch.cuda.synchronize()

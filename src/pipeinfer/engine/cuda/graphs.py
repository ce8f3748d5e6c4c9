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
from typing import Any

import numpy as np
import torch

from pipeinfer.attention.interface import Plan
from pipeinfer.attention.rows import PagedRows, RowArrays
from pipeinfer.engine.cuda.decode_packing import DecodePacker, Packed
from pipeinfer.engine.cuda.layout import Layout, Sizes
from pipeinfer.steps.step import Step

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
    drawn: torch.Tensor


# (plan, views) -> (logits [S, vocab], what is drawn [S, 2]): the step that is captured.
Body = Callable[[Plan, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


def record(
    body: Body,
    plan: Plan,
    layout: Layout,
    views: dict[str, torch.Tensor],
    stream: torch.cuda.Stream,
    pool: Any,
) -> Captured:
    """The body as a graph of `pool`'s memory, on `stream`, which is current."""
    for _ in range(TRIES):
        body(plan, views)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of this thread alone: NCCL has one of its own, which asks after events meanwhile.
    mode = "thread_local"
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        logits, drawn = body(plan, views)
    graph.replay()  # the first brings it to the device: a millisecond, of nobody's step here
    return Captured(graph, layout, views, logits, drawn)


def replay_seconds(captured: Captured, replays: int = REPLAYS) -> float:
    """The shortest of a few replays of whatever it reads now: enough to compare sizes."""
    times = []
    for _ in range(replays):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        captured.graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times)


def row_arrays(views: dict[str, torch.Tensor], table_rows: int) -> RowArrays:
    """The arrays of a step's rows out of its views, on whichever side they are."""
    table = views["table"]
    return RowArrays(
        lengths=views["lengths"],
        last_page=views["last_page"],
        q_indptr=views["q_indptr"],
        prefill_indptr=views["prefill_indptr"],
        kv_indptr=views["kv_indptr"],
        indices=views["indices"],
        table=table.view(table_rows, -1) if len(table) else table,
    )


@dataclass(frozen=True)
class Frame:
    """What all graphs of a runner share. pages: of the longest row; table: decodes read the page
    table instead of flat indices; dummy_slot: whom padding rows belong to.
    """

    pages: int
    page_size: int
    table: bool
    dummy_slot: int
    device: torch.device


class DecodeGraphs:
    """Steps of decode rows only, by the number of rows. `words`: the fixed int32 buffer that every
    graph reads.
    """

    def __init__(self, sizes: tuple[int, ...], frame: Frame) -> None:
        self.sizes = sizes
        self._frame = frame
        self._layouts = {size: self._layout(size) for size in sizes}
        most = max((layout.words for layout in self._layouts.values()), default=0)
        self.words = torch.zeros(most, dtype=torch.int32, device=frame.device)
        self._packer = DecodePacker(self._layouts, frame.page_size, frame.dummy_slot, frame.table)
        self._captured: dict[int, Captured] = {}

    def _layout(self, size: int) -> Layout:
        """Where a step of `size` rows lies; pages either as table or as flat indices."""
        pages = self._frame.pages
        if self._frame.table:
            return Layout(Sizes(size, size, size, pages, 0))
        return Layout(Sizes(size, size, size, 0, size * pages))

    def fitting(self, step: Step) -> int | None:
        """The smallest captured size for the step; None if there is none."""
        if step.decodes < len(step.slots):
            return None
        at = bisect_left(self.sizes, step.decodes)
        if at == len(self.sizes) or self.sizes[at] not in self._captured:
            return None
        return self.sizes[at]

    def layout(self, size: int) -> Layout:
        """Where a step of that size lies in the buffer."""
        return self._layouts[size]

    def rows(
        self, size: int, parity: int, host: dict[str, torch.Tensor], device: dict[str, torch.Tensor]
    ) -> PagedRows:
        """The rows of a step of that size for the backend, out of its views on both sides."""
        table_rows = size if self._frame.table else 0
        return PagedRows(
            decodes=size,
            longest_query=1,
            parity=parity,
            host=row_arrays(host, table_rows),
            device=row_arrays(device, table_rows),
            fixed=True,
        )

    def pack(self, step: Step, size: int, buffer: np.ndarray) -> Packed:
        """Packs the step for the graph of that size into a buffer int32 of at least its words."""
        return self._packer.pack(step, size, buffer)

    def drop_slower_small_ones(self, prepare: Callable[[int], Plan]) -> None:
        """Forgets small sizes that take longer than the next one: for very few rows, libraries'
        matrix kernels are not always faster. After `capture`, on its stream, with its `prepare`.
        """
        small = [size for size in self.sizes if size <= SMALL]
        seconds = {}
        for size in small:
            prepare(size)  # every size reads the buffer in its own way
            seconds[size] = replay_seconds(self._captured[size])
        for size, larger in reversed(list(pairwise(small))):
            best = min(seconds[other] for other in small if other >= larger)
            if seconds[size] > best:
                del self._captured[size]
        self.sizes = tuple(size for size in self.sizes if size in self._captured)

    def __getitem__(self, size: int) -> Captured:
        return self._captured[size]

    def capture(
        self,
        prepare: Callable[[int], Plan],
        body: Body,
        stream: torch.cuda.Stream,
        pool: Any,
        progress: Callable[[], None],
    ) -> None:
        """Captures every size on `stream`, which is current. prepare(size) fills `words` with a
        step of padding rows and plans it. progress() after each.
        """
        for size in sorted(self.sizes, reverse=True):
            layout = self._layouts[size]
            views = layout.tensors(self.words)
            self._captured[size] = record(body, prepare(size), layout, views, stream, pool)
            progress()

"""Steps as CUDA graphs: launched one by one, their kernels would take longer to start than to run.

Of decodes alone, by their number, and with prompts, by tokens and rows; those that are captured at
once largest first, all in one pool. A graph holds the whole step: it takes ids from last_token,
computes, samples by temperature and writes last_token. It reads fixed addresses only, which the
forward stream fills before a replay. Knows no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from pipeinfer.attention.interface import Plan
from pipeinfer.engine.device import Device, Work
from pipeinfer.engine.graph_shapes import (
    MAX_PADDING,
    MAX_PADDING_DIVISOR,
    MIN_SHARED_DECODES,
    decode_only,
    holds,
)
from pipeinfer.kernels.interface import DeviceStep, GraphShape
from pipeinfer.step import Step

SMALL = 8
REPLAYS = 8


@dataclass(frozen=True)
class Captured:
    """One size; `logits` and `drawn` are what it leaves behind until the next replay, or capture,
    of any."""

    views: DeviceStep
    replay: Work
    logits: torch.Tensor
    drawn: torch.Tensor


# (views, plan) -> (logits [S, vocab], what is drawn [S, 2]): the step that is captured.
Body = Callable[[DeviceStep, Plan], tuple[torch.Tensor, torch.Tensor]]


class Graphs:
    """Of a device, by shape.

    decodes: numbers of decode rows that have a graph; mixed: shapes with prefills that have one.
    Either is the shared-prefix variant only where there is no other. shared_prefix_shapes: all
    shapes that are shared-prefix variants. All ascend. deferred: shapes whose capture is deferred,
    the next one first.
    slow: tokens of mixed shapes whose steps take the next larger one's graph, if it fits them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.decodes: tuple[int, ...] = ()
        self.mixed: tuple[GraphShape, ...] = ()
        self.shared_prefix_shapes: tuple[GraphShape, ...] = ()
        self.deferred: list[GraphShape] = []
        self.slow: frozenset[int] = frozenset()
        self._captured: dict[GraphShape, Captured] = {}

    def __getitem__(self, shape: GraphShape) -> Captured:
        return self._captured[shape]

    def seconds(self, shape: GraphShape, times: int = REPLAYS) -> float:
        """What a replay takes of whatever graphs read now: enough to compare sizes."""
        return self._device.seconds(self[shape].replay, times)

    def __contains__(self, shape: GraphShape) -> bool:
        return shape in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def planned(self) -> tuple[GraphShape, ...]:
        """As `mixed`, with those that get a graph later."""
        later = (shape for shape in self.deferred if shape.prefills and not shape.shared_prefix)
        return tuple(sorted({*self.mixed, *later}))

    def like(self, shape: GraphShape, step: Step) -> GraphShape | None:
        """`shape`, or while that has no graph, the smallest that has one for as many tokens and
        for the step."""
        there = self._either(shape)
        if there in self:
            return there
        same = (other for other in self.mixed if other.tokens == shape.tokens)
        return next((other for other in same if holds(other, step)), None)

    def fitting(self, step: Step) -> Captured | None:
        """The smallest for the step; None if there is none, or it is far larger. Where decodes
        share, one in which they do; if there is none, each reads for itself."""
        if step.shared_prefixes is not None and step.decodes >= MIN_SHARED_DECODES:
            shape = self._smallest(self.shared_prefix_shapes, step)
            if shape is not None:
                return self[shape]
        if step.decodes == len(step.slots):
            at = bisect_left(self.decodes, step.decodes)
            return (
                None
                if at == len(self.decodes)
                else self[self._either(decode_only(self.decodes[at]))]
            )
        shape = self._smallest(self.mixed, step)
        return None if shape is None else self[shape]

    def _smallest(self, shapes: Sequence[GraphShape], step: Step) -> GraphShape | None:
        """Of `shapes`, ascending, the first for the step that is not slow, or else the first; None
        if there is none, or it is far larger."""
        slow: GraphShape | None = None
        for shape in shapes:
            if _far_larger(shape, len(step.tokens)):
                break
            if holds(shape, step):
                if not shape.prefills or shape.tokens not in self.slow:
                    return shape
                slow = slow or shape
        return slow

    def _either(self, shape: GraphShape) -> GraphShape:
        """`shape`, or where that has no graph, the one of that size whose decodes share."""
        return shape if shape in self else replace(shape, shared_prefix=True)

    def capture(
        self,
        shapes: Sequence[GraphShape],
        prepare: Callable[[GraphShape], tuple[DeviceStep, Plan]],
        body: Body,
        progress: Callable[[], None],
    ) -> None:
        """Captures every shape, the largest first, from within the device's `run`. prepare(shape)
        puts a step of padding rows where graphs read, and plans it. progress() after each.
        """
        for shape in sorted(shapes, reverse=True):
            views, plan = prepare(shape)
            made = self._device.capture(partial(body, views, plan))
            self._captured[shape] = Captured(views, made.run, *made.tensors)
            progress()
        self._list()

    def _list(self) -> None:
        """What was captured, by kind."""
        every = sorted(self._captured)
        self.decodes = tuple(sorted({shape.decodes for shape in every if not shape.prefills}))
        mixed = {
            self._either(replace(shape, shared_prefix=False)) for shape in every if shape.prefills
        }
        self.mixed = tuple(sorted(mixed))
        self.shared_prefix_shapes = tuple(shape for shape in every if shape.shared_prefix)

    def drop_slower_small_ones(self, prepare: Callable[[GraphShape], object]) -> None:
        """Forgets small numbers of decodes that take longer than the next one: for very few rows,
        libraries' matrix kernels are not always faster. As `capture`, after it.
        """
        small = [size for size in self.decodes if size <= SMALL]
        seconds: dict[int, float] = {}
        for size in small:
            prepare(decode_only(size))  # all read the same words, each in its own way
            seconds[size] = self.seconds(decode_only(size))
        for size, larger in reversed(list(pairwise(small))):
            best = min(seconds[other] for other in small if other >= larger)
            if seconds[size] > best:
                del self._captured[decode_only(size)]
        self._list()


def _far_larger(shape: GraphShape, tokens: int) -> bool:
    """Whether a step of so many tokens would be padded too much."""
    return shape.tokens - tokens > max(MAX_PADDING, shape.tokens // MAX_PADDING_DIVISOR)

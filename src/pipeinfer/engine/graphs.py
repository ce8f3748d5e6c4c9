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
from pipeinfer.engine.graph_shapes import MOST_PADDING, PADDING_SHARE, SHARING, decode_only, holds
from pipeinfer.kernels.tables import DeviceStep, GraphShape
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
    """Of a device, by room. decodes: numbers of decode rows that have a graph, mixed: rooms with
    prompts that have one, either of which share only where no other is there; sharing: all rooms
    for decodes that share. All ascend. left: rooms that get one later, the next one first. slow:
    tokens of rooms with prompts whose steps take the next larger one's graph, if it fits them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.decodes: tuple[int, ...] = ()
        self.mixed: tuple[GraphShape, ...] = ()
        self.sharing: tuple[GraphShape, ...] = ()
        self.left: list[GraphShape] = []
        self.slow: frozenset[int] = frozenset()
        self._captured: dict[GraphShape, Captured] = {}

    def __getitem__(self, room: GraphShape) -> Captured:
        return self._captured[room]

    def seconds(self, room: GraphShape, times: int = REPLAYS) -> float:
        """What a replay takes of whatever graphs read now: enough to compare sizes."""
        return self._device.seconds(self[room].replay, times)

    def __contains__(self, room: GraphShape) -> bool:
        return room in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def planned(self) -> tuple[GraphShape, ...]:
        """As `mixed`, with those that get a graph later."""
        later = (room for room in self.left if room.prefills and not room.shares)
        return tuple(sorted({*self.mixed, *later}))

    def like(self, room: GraphShape, step: Step) -> GraphShape | None:
        """`room`, or while that has no graph, the smallest that has one, for as many tokens and for
        the step."""
        there = self._either(room)
        if there in self:
            return there
        same = (other for other in self.mixed if other.tokens == room.tokens)
        return next((other for other in same if holds(other, step)), None)

    def fitting(self, step: Step) -> Captured | None:
        """The smallest for the step; None if there is none, or it is far larger. Where decodes
        share, one in which they do; if there is none, each reads for itself."""
        if step.shared_prefixes is not None and step.decodes >= SHARING:
            room = self._smallest(self.sharing, step)
            if room is not None:
                return self[room]
        if step.decodes == len(step.slots):
            at = bisect_left(self.decodes, step.decodes)
            return (
                None
                if at == len(self.decodes)
                else self[self._either(decode_only(self.decodes[at]))]
            )
        room = self._smallest(self.mixed, step)
        return None if room is None else self[room]

    def _smallest(self, rooms: Sequence[GraphShape], step: Step) -> GraphShape | None:
        """Of `rooms`, ascending, the first for the step that is not slow, or else the first; None
        if there is none, or it is far larger."""
        slow: GraphShape | None = None
        for room in rooms:
            if _far_larger(room, len(step.tokens)):
                break
            if holds(room, step):
                if not room.prefills or room.tokens not in self.slow:
                    return room
                slow = slow or room
        return slow

    def _either(self, room: GraphShape) -> GraphShape:
        """`room`, or where that has no graph, the one of that size whose decodes share."""
        return room if room in self else replace(room, shares=True)

    def capture(
        self,
        rooms: Sequence[GraphShape],
        prepare: Callable[[GraphShape], tuple[DeviceStep, Plan]],
        body: Body,
        progress: Callable[[], None],
    ) -> None:
        """Captures every room, the largest first, from within the device's `run`. prepare(room)
        puts a step of padding rows where graphs read, and plans it. progress() after each.
        """
        for room in sorted(rooms, reverse=True):
            views, plan = prepare(room)
            made = self._device.capture(partial(body, views, plan))
            self._captured[room] = Captured(views, made.again, *made.tensors)
            progress()
        self._list()

    def _list(self) -> None:
        """What was captured, by kind."""
        every = sorted(self._captured)
        self.decodes = tuple(sorted({room.decodes for room in every if not room.prefills}))
        mixed = {self._either(replace(room, shares=False)) for room in every if room.prefills}
        self.mixed = tuple(sorted(mixed))
        self.sharing = tuple(room for room in every if room.shares)

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


def _far_larger(room: GraphShape, tokens: int) -> bool:
    """Whether a step of so many tokens would be padded too much."""
    return room.tokens - tokens > max(MOST_PADDING, room.tokens // PADDING_SHARE)

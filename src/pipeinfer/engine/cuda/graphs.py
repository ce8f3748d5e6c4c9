"""Steps as CUDA graphs: launched one by one, their kernels would take longer to start than to run.

Of decodes alone, by their number, and with prompts, by tokens and rows; captured largest first in
one pool. A graph holds the whole step: it takes ids from last_token, computes, samples by
temperature and writes last_token. It reads fixed addresses only, which the forward stream fills
before a replay. Knows no request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from pipeinfer.attention.interface import Plan
from pipeinfer.engine.cuda.arrays import Cut
from pipeinfer.engine.cuda.rooms import MOST_PADDING, PADDING_SHARE, Room
from pipeinfer.steps.step import Step

SMALL = 8
REPLAYS = 8
TRIES = 2  # forward passes before the capture: lazy initialisation must not be captured


@dataclass(frozen=True)
class Captured:
    """One size: the graph, and what it leaves behind until the next replay of any size."""

    graph: torch.cuda.CUDAGraph
    cut: Cut
    logits: torch.Tensor
    drawn: torch.Tensor


# (cut, plan) -> (logits [S, vocab], what is drawn [S, 2]): the step that is captured.
Body = Callable[[Cut, Plan], tuple[torch.Tensor, torch.Tensor]]


def record(body: Body, cut: Cut, plan: Plan, stream: torch.cuda.Stream, pool: Any) -> Captured:
    """The body as a graph of `pool`'s memory, on `stream`, which is current."""
    for _ in range(TRIES):
        body(cut, plan)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of this thread alone: NCCL has one of its own, which asks after events meanwhile.
    mode = "thread_local"
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
        logits, drawn = body(cut, plan)
    graph.replay()  # the first brings it to the device: a millisecond, of nobody's step here
    return Captured(graph, cut, logits, drawn)


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


class Graphs:
    """By room. decodes: numbers of decode rows that have a graph, mixed: rooms with prompts that
    have one; both ascend.
    """

    def __init__(self) -> None:
        self.decodes: tuple[int, ...] = ()
        self.mixed: tuple[Room, ...] = ()
        self._captured: dict[Room, Captured] = {}

    def __getitem__(self, room: Room) -> Captured:
        return self._captured[room]

    def __contains__(self, room: Room) -> bool:
        return room in self._captured

    def fitting(self, step: Step) -> Captured | None:
        """The smallest for the step; None if there is none, or it is far larger."""
        if step.decodes == len(step.slots):
            at = bisect_left(self.decodes, step.decodes)
            return None if at == len(self.decodes) else self[alone(self.decodes[at])]
        tokens = len(step.tokens)
        for room in self.mixed:
            if room.tokens - tokens > max(MOST_PADDING, room.tokens // PADDING_SHARE):
                return None
            if room.holds(step):
                return self[room]
        return None

    def capture(
        self,
        rooms: Sequence[Room],
        prepare: Callable[[Room], tuple[Cut, Plan]],
        body: Body,
        stream: torch.cuda.Stream,
        pool: Any,
        progress: Callable[[], None],
    ) -> None:
        """Captures every room, the largest first, on `stream`, which is current. prepare(room) puts
        a step of padding rows where graphs read, and plans it. progress() after each.
        """
        for room in sorted(rooms, reverse=True):
            self._captured[room] = record(body, *prepare(room), stream, pool)
            progress()
        every = sorted(self._captured)
        self.decodes = tuple(room.decodes for room in every if not room.prefills)
        self.mixed = tuple(room for room in every if room.prefills)

    def drop_slower_small_ones(self, prepare: Callable[[Room], object]) -> None:
        """Forgets small numbers of decodes that take longer than the next one: for very few rows,
        libraries' matrix kernels are not always faster. After `capture`, on its stream, with its
        `prepare`.
        """
        small = [size for size in self.decodes if size <= SMALL]
        seconds = {}
        for size in small:
            prepare(alone(size))  # all read the same words, each in its own way
            seconds[size] = replay_seconds(self[alone(size)])
        for size, larger in reversed(list(pairwise(small))):
            best = min(seconds[other] for other in small if other >= larger)
            if seconds[size] > best:
                del self._captured[alone(size)]
        self.decodes = tuple(size for size in self.decodes if alone(size) in self._captured)


def alone(decodes: int) -> Room:
    """For so many decodes and nothing else."""
    return Room(decodes, decodes, 0)

"""Launches steps on a device and reports their ends on the event loop, in order.

Knows a runner that launches, and an event loop; no plan, no model, and no kind of device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeinfer.engine.device import Failed, Mark
from pipeinfer.steps.step import Sampled, Step

if TYPE_CHECKING:  # who drives a device that computes nothing starts without torch
    import torch

    from pipeinfer.engine.buffers import StepBuffers
    from pipeinfer.engine.masks import Masks
    from pipeinfer.engine.runner import PackedStep, Runner
    from pipeinfer.engine.scores import StepScores

# Steps submitted and not yet finished. The overlap loop needs two; of several ranks, one that is
# not rank 0 may be told of a third: plans go by the results of rank 0.
MOST_UNFINISHED = 4


# Writes the masks of a step's masked rows, int32 [N, W]; returns the rows that must not sample
# anything, with the reason.
Fill = Callable[[np.ndarray], dict[int, str]]


def unwatched(step: Step) -> None:
    """Nobody looks on."""


class Watch(Protocol):
    """Looks on, on the thread that launches steps, and must not change them."""

    def before(self, step: Step, /) -> None:
        """`step` is about to be launched."""
        ...

    def close(self) -> None:
        """No step follows."""
        ...


@dataclass
class LaunchedStep:
    """`step` on its way through the device, in `buffers` of its parity.

    mark: its end, which is not ready before a step with masked rows was finished.
    packed: what is left to be computed: from its launch on, and of a step with masked rows until it
    was finished. refused: those of its rows that must not sample, with the reason.

    Written by the device's work, read when the step has ended:
    drawn: int64 [S, 2], how many tokens each row of logits gave, and which. rows: those of `drawn`
    that belong to rows that sample, in their order. scores: where log-probs are asked for.
    logits: [S, vocab], if they are kept.
    """

    step: Step
    buffers: StepBuffers
    mark: Mark = field(init=False)
    packed: PackedStep | None = None
    refused: dict[int, str] = field(default_factory=dict[int, str])
    drawn: np.ndarray = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    rows: np.ndarray | slice = field(default_factory=lambda: slice(0))
    scores: StepScores | None = None
    logits: torch.Tensor | None = None
    _sampled: Sampled | None = None

    def take(self) -> Sampled:
        """What it gave, waited for if need be; raises what the step raised."""
        if self._sampled is None:
            self.mark.wait()
            sampled = Sampled.of(self.drawn[self.rows], self.refused)
            self._sampled = sampled if self.scores is None else self.scores.beside(sampled)
        return self._sampled


class Executor:
    """`on_done(step, sampled, seconds)` or `on_error(step, error)` is called on `loop`, in order,
    exactly once for each step; after an error later steps run as usual. `busy_seconds` is the time
    in which the device computed steps, `idle_seconds` that between steps with none queued.

    What the masked rows of a step may sample follows from what the step before has given: once that
    was reported the step is finished, and those behind it are launched only then.
    """

    def __init__(
        self,
        runner: Runner,
        on_done: Callable[[Step, Sampled, float], None],
        on_error: Callable[[Step, Exception], None],
        loop: asyncio.AbstractEventLoop | None = None,
        watch: Watch | None = None,
        masks: Masks | None = None,
    ) -> None:
        """`loop`: the running one if None. `masks`: where steps may have masked rows."""
        self._runner = runner
        self._on_done = on_done
        self._on_error = on_error
        self._loop = loop or asyncio.get_running_loop()
        self._watch = watch
        self._before = unwatched if watch is None else watch.before
        self._masks = masks
        # Not yet reported, oldest first; no LaunchedStep where the launch has failed.
        self._launched: deque[tuple[Step, Mark, LaunchedStep | None]] = deque()
        self._unfinished = False  # the one that was launched last waits for its masks
        self._behind: deque[Step] = deque()  # it
        self._closed = False
        self.steps = 0  # reported
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0

    @property
    def unreported(self) -> int:
        """Steps submitted and not yet reported."""
        return len(self._launched) + len(self._behind)

    def submit(self, step: Step) -> None:
        """Launches `step`; call it on the loop. Raises RuntimeError when closed or when too many
        steps are unfinished, which the depth of the overlap loop rules out. What the launch raises
        is reported as the step's end, in its place.
        """
        if self._closed:
            raise RuntimeError(f"step {step.number} submitted to a closed executor")
        # What has ended does not count: a loop that takes plan after plan comes to reports late.
        if self.unreported >= MOST_UNFINISHED:
            unfinished = sum(not mark.ready for _, mark, _ in self._launched) + len(self._behind)
            if unfinished >= MOST_UNFINISHED:
                raise RuntimeError(
                    f"step {step.number} submitted while {unfinished} are unfinished"
                )
        self._behind.append(step)
        self._go_on()

    def close(self) -> None:
        """Waits for the launched steps; their reports may still come. No step follows."""
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._runner.device.submit(self._watch.close)
        self._runner.device.close()
        if self._masks is not None:
            self._masks.close()

    def _go_on(self) -> None:
        """Launches what waits, up to a step whose masks cannot be known yet."""
        while self._behind and not self._unfinished:
            step, launched = self._behind.popleft(), None
            try:
                launched = self._runner.launch(step, self._before)
                self._unfinished = step.masked is not None
                mark = launched.mark
            except Exception as error:  # whatever it is, it belongs to this step's owner
                mark = Failed(error)
            self._launched.append((step, mark, launched))
            if self._unfinished:
                self._finish()
            else:
                mark.then(self._loop, self._report)

    def _finish(self) -> None:
        """The step that waits for its masks, if all before it were reported."""
        if not self._unfinished or len(self._launched) > 1:
            return
        step, mark, launched = self._launched[0]
        assert self._masks is not None and launched is not None
        try:
            self._runner.finish(launched, partial(self._masks.fill, step))
        except Exception as error:
            mark = Failed(error)
            self._launched[0] = step, mark, None
        self._unfinished = False
        mark.then(self._loop, self._report)

    def _report(self) -> None:
        """Whatever has ended; a step that was never launched may have called too early."""
        while self._launched and self._launched[0][1].ready:
            step, mark, launched = self._launched.popleft()
            try:
                mark.wait()  # raises why a launch has failed; a fault of a kernel shows only here
                assert launched is not None
                sampled = launched.take()
                if self._masks is not None:
                    sampled = self._masks.take(step, sampled)
            except Exception as error:
                self._on_error(step, error)
                continue
            self.steps += 1
            self.busy_seconds += mark.busy
            self.idle_seconds += mark.idle
            self._on_done(step, sampled, mark.busy)
        self._finish()
        self._go_on()

"""Launches steps on a device and reports their ends on the event loop, in order.

Knows a runner that launches, and an event loop; no plan, no model, and no kind of device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from pipeinfer.engine.device import Device, Failed, Mark
from pipeinfer.steps.step import Sampled, Step

# Steps submitted and not yet finished. The overlap loop needs two; of several ranks, one that is
# not rank 0 may be told of a third: plans go by the results of rank 0.
MOST_UNFINISHED = 4


# Writes the masks of a step's masked rows, int32 [N, W]; returns the rows that must not sample
# anything, with the reason.
Fill = Callable[[np.ndarray], dict[int, str]]


class Watch(Protocol):
    """Looks on, on the thread that launches steps, and must not change them."""

    def before(self, step: Step, /) -> None:
        """`step` is about to be launched."""
        ...

    def close(self) -> None:
        """No step follows."""
        ...


class LaunchedStep(Protocol):
    """A launched step; `mark` is its end, which is not ready before the step was finished."""

    @property
    def mark(self) -> Mark: ...

    def take(self) -> Sampled:
        """What it gave, waited for if need be; raises what the step raised."""
        ...

    def finish(self, fill: Fill, /) -> None:
        """Queues the rest of a step with masked rows, before any other is launched."""
        ...


class Runner(Protocol):
    """See engine/runner.py."""

    @property
    def device(self) -> Device: ...

    def launch(self, step: Step, before: Callable[[Step], None], /) -> LaunchedStep:
        """Queues `step` behind those that were launched before. Calls `before` with it right before
        its kernels are launched, on the thread that launches them. A step with masked rows is
        computed up to their logits."""
        ...


@dataclass(frozen=True)
class NotLaunched:
    """In place of a step whose launch raised."""

    mark: Failed

    def take(self) -> Sampled:
        self.mark.wait()

    def finish(self, fill: Fill) -> None:
        """There is nothing to finish."""


class Masks(Protocol):
    """What rows with a grammar may sample; see engine/masks.py."""

    def fill(self, step: Step, words: np.ndarray, /) -> dict[int, str]: ...

    def take(self, step: Step, sampled: Sampled, /) -> Sampled: ...

    def close(self) -> None: ...


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
        self._launched: deque[tuple[Step, LaunchedStep]] = deque()  # not yet reported, oldest first
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
            unfinished = sum(not one.mark.ready for _, one in self._launched) + len(self._behind)
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
            step = self._behind.popleft()
            try:
                launched = self._runner.launch(step, self._before)
                self._unfinished = step.masked is not None
            except Exception as error:  # whatever it is, it belongs to this step's owner
                launched = NotLaunched(Failed(error))
            self._launched.append((step, launched))
            if self._unfinished:
                self._finish()
            else:
                launched.mark.then(self._loop, self._report)

    def _finish(self) -> None:
        """The step that waits for its masks, if all before it were reported."""
        if not self._unfinished or len(self._launched) > 1:
            return
        assert self._masks is not None
        step, launched = self._launched[0]
        try:
            launched.finish(partial(self._masks.fill, step))
        except Exception as error:
            launched = NotLaunched(Failed(error))
            self._launched[0] = step, launched
        self._unfinished = False
        launched.mark.then(self._loop, self._report)

    def _report(self) -> None:
        """Whatever has ended; a step that was never launched may have called too early."""
        while self._launched and self._launched[0][1].mark.ready:
            step, launched = self._launched.popleft()
            try:
                sampled = launched.take()
                if self._masks is not None:
                    sampled = self._masks.take(step, sampled)
            except Exception as error:  # a fault of a kernel shows only here
                self._on_error(step, error)
                continue
            self.steps += 1
            self.busy_seconds += launched.mark.busy
            self.idle_seconds += launched.mark.idle
            self._on_done(step, sampled, launched.mark.busy)
        self._finish()
        self._go_on()


def unwatched(step: Step) -> None:
    """Nobody looks on."""

"""Steps of a scheduler, from its plan to the result: how long, how many decodes, how much prompt.

Knows plans and results; no requests. A scheduler keeps sums of the last minute in any case.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from pipeinfer.control import StepMade
from pipeinfer.messages import Begin, Plan, Result
from pipeinfer.observe.spans import Exchange
from pipeinfer.wire import unpack

MAX_PLANNED = 64  # plans; far more than are ever in flight
UNKNOWN = -1
SUM_SECONDS = 0.5  # seconds of a sum
MAX_SUMS = 120  # a minute of them


class _Planned(NamedTuple):
    """A plan without a result. `known`: tokens that each row's request was admitted with."""

    at: float
    known: np.ndarray


class StepTimer:
    """`target`: what a step should take at most, in seconds."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._known = np.full(256, UNKNOWN, dtype=np.int64)  # by slot
        self._planned: OrderedDict[tuple[int, int], _Planned] = OrderedDict()
        self._result_at = 0.0

    def on_plan(self, plan: Plan, at: float) -> None:
        """A plan left."""
        for release in plan.releases:
            self._admit(release.slot, UNKNOWN)
        for admit in plan.admits:
            self._admit(admit.slot, len(admit.token_ids) // 4)
        slots = unpack(plan.slots)
        if len(slots) and int(slots.max()) >= len(self._known):
            self._admit(int(slots.max()), UNKNOWN)
        self._planned[plan.epoch, plan.number] = _Planned(at, self._known[slots])
        while len(self._planned) > MAX_PLANNED:
            self._planned.popitem(last=False)

    def on_result(self, result: Result, at: float) -> StepMade | None:
        """A result came; None if its plan is unknown, or it computed nothing.

        A row decodes if it begins behind the tokens that its request was admitted with; where those
        are not known, if it computed one token.
        """
        planned = self._planned.pop((result.epoch, result.number), None)
        before, self._result_at = self._result_at, at
        starts, counts = unpack(result.starts), unpack(result.counts)
        if planned is None or len(planned.known) != len(counts) or not counts.any():
            return None
        known = planned.known
        decodes = np.where(known == UNKNOWN, counts == 1, starts >= known) & (counts > 0)
        return StepMade(
            at=planned.at,
            seconds=at - max(before, planned.at),
            decodes=int(np.count_nonzero(decodes)),
            prompt_tokens=int(counts[~decodes].sum()),
            target=self._target,
        )

    def begin(self) -> None:
        """An epoch begins: no slot is taken, and no plan is in flight."""
        self._planned.clear()
        self._known[:] = UNKNOWN

    def _admit(self, slot: int, known: int) -> None:
        if slot >= len(self._known):
            more = np.full(2 * (slot + 1), UNKNOWN, dtype=np.int64)
            more[: len(self._known)] = self._known
            self._known = more
        self._known[slot] = known


class LastMinute:
    """A scheduler's steps: each is told to `stepped`, and sums by half seconds are kept of those of
    the last minute. `target`: see StepTimer."""

    def __init__(self, target: float, stepped: Callable[[StepMade], object]) -> None:
        self._steps = StepTimer(target)
        self._stepped = stepped
        self._sums: deque[StepMade] = deque(maxlen=MAX_SUMS)

    def on_exchange(self, exchange: Exchange) -> None:
        """Reads a result, then the plans that it brought."""
        event, outputs, began, ended = exchange
        if type(event) is Result:
            step = self._steps.on_result(event, began)
            if step is not None:
                self._add(step)
                self._stepped(step)
        for send in outputs:
            message = send.message
            if type(message) is Plan:
                self._steps.on_plan(message, ended)
            elif type(message) is Begin:
                self._steps.begin()

    def sums(self, before: float) -> tuple[StepMade, ...]:
        """Those that had ended at `before` (Unix seconds), and began at most a minute earlier."""
        from_ = before - SUM_SECONDS * MAX_SUMS
        return tuple(one for one in self._sums if from_ <= one.at <= before - SUM_SECONDS)

    def _add(self, step: StepMade) -> None:
        at = step.at // SUM_SECONDS * SUM_SECONDS
        if not self._sums or self._sums[-1].at != at:
            self._sums.append(msgspec.structs.replace(step, at=at))
            return
        last = self._sums[-1]
        self._sums[-1] = StepMade(
            at=last.at,
            seconds=max(last.seconds, step.seconds),
            decodes=last.decodes + step.decodes,
            prompt_tokens=last.prompt_tokens + step.prompt_tokens,
            target=max(last.target, step.target),
            count=last.count + 1,
        )

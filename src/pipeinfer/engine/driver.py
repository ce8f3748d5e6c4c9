"""The engine's I/O beside the bus: it hands steps to the executor and reports their end.

Knows no plan and no memory; a step that fails ends the process, because what it left on the device
is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pipeinfer.engine.core import Capture, Compile, Compute, StepFailed
from pipeinfer.engine.executor import Executor
from pipeinfer.engine.late_graphs import LateGraphs
from pipeinfer.engine.phases import Phases
from pipeinfer.events import Compiled, GraphDue, StepDone
from pipeinfer.messages import Message
from pipeinfer.packing import pack
from pipeinfer.params import StructuredOutputs
from pipeinfer.steps.step import Sampled, Step

log = logging.getLogger(__name__)

NOTHING: Mapping[str, float] = MappingProxyType({})
PAUSE = 0.5  # seconds without a step after which percentiles begin anew


StartExecutor = Callable[
    [Callable[[Step, Sampled, float], None], Callable[[Step, Exception], None]], Executor
]


# Has a grammar compiled, which may be slow, and tells the other why it cannot be, or ""; in these
# slots no request has one any more.
PrepareGrammar = Callable[[StructuredOutputs, Callable[[str], None], bool, Sequence[int]], None]


def nothing_to_prepare(
    spec: StructuredOutputs, then: Callable[[str], None], slow: bool, released: Sequence[int]
) -> None:
    """For engines without grammars."""
    then("this engine serves no grammars")


class DeviceDriver:
    """Hands every Compute that the core sends to an executor, in order, every Compile to `prepare`,
    and every Capture to `late`.

    `begin(on_done, on_error)` makes the executor, on the running loop. `phases`: where core and
    runner note what a step costs; the driver adds what it takes to hand the result on. `late`:
    captures what is left; `start`: what the engine's start took.
    """

    def __init__(
        self,
        begin: StartExecutor,
        phases: Phases,
        prepare: PrepareGrammar = nothing_to_prepare,
        late: LateGraphs | None = None,
        start: Mapping[str, float] = NOTHING,
    ) -> None:
        self._begin = begin
        self._phases = phases
        self._prepare = prepare
        self._late = late
        self._start = start
        self._unreported = 0
        self._quiet_since = 0.0
        self._executor: Executor | None = None
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed
        self._executor = self._begin(self._done, self._failed)
        if self._late is not None:
            self._late.start(self._quiet, lambda: feed(GraphDue()))

    def _quiet(self) -> float:
        """For how many seconds there was no step."""
        return 0.0 if self._unreported else time.monotonic() - self._quiet_since

    def deliver(self, message: Message) -> None:
        assert self._executor is not None
        match message:
            case Compile():
                self._compile(message)
            case Compute():
                self._compute(message)
            case Capture():
                assert self._late is not None
                self._late.capture()
            case _:
                raise TypeError(f"a device takes no {type(message).__name__}")

    def _compile(self, message: Compile) -> None:
        loop = asyncio.get_running_loop()

        def then(error: str) -> None:
            """Called on whichever thread."""
            compiled = Compiled(message.request_id, error)
            with contextlib.suppress(RuntimeError):  # the stage has stopped meanwhile
                loop.call_soon_threadsafe(self._tell, compiled)

        self._prepare(message.spec, then, message.slow, message.released)

    def _tell(self, event: Message) -> None:
        assert self._feed is not None
        self._feed(event)

    def _compute(self, message: Compute) -> None:
        assert self._executor is not None
        if not self._unreported and time.monotonic() - self._quiet_since > PAUSE:
            self._phases.begin_anew()
        self._unreported += 1
        self._executor.submit(message.step)

    async def stop(self) -> None:
        if self._late is not None:
            self._late.close()
        if self._executor is not None:
            self._executor.close()

    def stats(self) -> dict[str, float]:
        """Seconds in which the device computed, and in which it had no step queued; phases.py's; of
        the start, and how many graphs there are."""
        executor = self._executor
        if executor is None:
            return {}
        return {
            "busy_seconds": executor.busy_seconds,
            "idle_seconds": executor.idle_seconds,
            **self._phases.statistics(),
            **self._start,
            **(self._late.stats() if self._late is not None else {}),
        }

    def _done(self, step: Step, sampled: Sampled, seconds: float) -> None:
        assert self._feed is not None
        self._unreported -= 1
        self._quiet_since = time.monotonic()
        with self._phases.span("result", step.number):
            self._feed(step_done(step, sampled, seconds))
        self._phases.done(step.number, len(step.slots), step.decodes)

    def _failed(self, step: Step, error: Exception) -> None:
        assert self._feed is not None
        self._unreported -= 1
        log.error("step %d of epoch %d", step.number, step.epoch, exc_info=error)
        self._feed(StepFailed(step.epoch, step.number, str(error)))


def step_done(step: Step, sampled: Sampled, seconds: float = 0.0) -> StepDone:
    """What the core is told of a step that gave `sampled`."""
    counts, ids, bad = map(pack, (sampled.counts, sampled.ids, sampled.bad))
    return StepDone(
        epoch=step.epoch,
        number=step.number,
        counts=counts,
        token_ids=ids,
        seconds=seconds,
        bad=bad,
        logprobs=sampled.logprobs,
        prompts=sampled.prompts,
        refused=dict(sampled.refused),
        mask_units=dict(sampled.mask_units),
    )

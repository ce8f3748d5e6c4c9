"""Launches steps on a device and reports their ends on the event loop, in order.

    DeviceDriver         takes what the core sends (Compute, Compile, Capture and others), gives
                         back StepDone
    Executor             launches steps, samples masked rows once masks are known, reports ends
    BackgroundCapture    CUDA graphs that are captured while there is no step

Uses a runner that launches, and an event loop; no plan, no model, no torch and no kind of device. A
step that fails ends the process, because the content of the device's memory is unknown then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from pipeinfer.core import Compiled, GraphDue, StepDone
from pipeinfer.engine.core import (
    AdapterRead,
    Capture,
    Compile,
    Compute,
    FillPages,
    FindPages,
    FoundPages,
    InvalidatePages,
    MarkPagesUnusable,
    Resume,
    Resumed,
    StepFailed,
    Suspend,
    Suspended,
)
from pipeinfer.engine.device import FailedEvent, StepEvent
from pipeinfer.engine.profiling import Phases
from pipeinfer.memory.page_directory import PageChains
from pipeinfer.messages import LoadAdapter, Message
from pipeinfer.params import StructuredOutputs
from pipeinfer.runtime.logs import DETAILS
from pipeinfer.step import PeerLost, Sampled, Step
from pipeinfer.wire import pack

if TYPE_CHECKING:  # a driver of a device that computes nothing starts without torch
    from pipeinfer.engine.kept_memory import KeptMemory
    from pipeinfer.engine.lora import AdapterLoads
    from pipeinfer.engine.masks import Masks
    from pipeinfer.engine.runner import LaunchedStep, Runner
    from pipeinfer.engine.sleeping import EngineMemory

# Steps of one epoch submitted and not yet ended, at most; more are a fault of the loop. The overlap
# loop has two. A rank above 0 may lag: the scheduler plans by the results of rank 0, so such a rank
# gets a third, and the fourth leaves room. An epoch that ends leaves its steps on the device, and
# the next epoch does not wait for them.
MAX_UNFINISHED = 4


class StepObserver(Protocol):
    """Observer of steps, called on the thread that launches them; must not change them."""

    def before(self, step: Step, /) -> None:
        """`step` is about to be launched."""
        ...

    def close(self) -> None:
        """The executor was closed: no step follows."""
        ...


class Executor:
    """Launches steps in order, and calls `on_done(step, sampled, seconds)` or `on_error(step,
    error)` on `loop`, in order and exactly once for each step. An error is meant to end the
    process.

    Grammar masks of step N need the tokens of step N - 1. So a step with masked rows is sampled
    only after step N - 1 was reported, and later steps are launched only after that.

    Attributes:
    - busy_seconds: time in which the device computed steps
    - idle_seconds: time between steps in which none was queued
    - submitted, launched: numbers of steps so far
    - steps: how many were reported without an error
    """

    def __init__(
        self,
        runner: Runner,
        on_done: Callable[[Step, Sampled, float], None],
        on_error: Callable[[Step, Exception], None],
        loop: asyncio.AbstractEventLoop | None = None,
        observer: StepObserver | None = None,
        masks: Masks | None = None,
    ) -> None:
        """Makes an executor without steps.

        - loop: None: the running loop
        - masks: None: no step may have masked rows
        """
        self._runner = runner
        self._on_done = on_done
        self._on_error = on_error
        self._loop = loop or asyncio.get_running_loop()
        self._observer = observer
        self._before = None if observer is None else observer.before
        self._masks = masks
        # Not yet reported, oldest first. LaunchedStep is None if the launch failed.
        self._launched: deque[tuple[Step, StepEvent, LaunchedStep | None]] = deque()
        self._awaits_masks = False  # the last launched step waits for its masks
        self._waiting: deque[Step] = deque()  # submitted, not launched
        self._closed = False
        self.submitted = self.launched = 0
        self.steps = 0  # reported
        self.busy_seconds = 0.0
        self.idle_seconds = 0.0

    @property
    def unreported(self) -> int:
        """Steps submitted and not yet reported."""
        return len(self._launched) + len(self._waiting)

    def submit(self, step: Step) -> None:
        """Launches `step`; to be called on the loop. An error of the launch is reported as the end
        of the step, in its order. Raises RuntimeError when closed or when too many steps are
        unfinished, which the depth of the overlap loop rules out.
        """
        if self._closed:
            raise RuntimeError(f"step {step.number} submitted to a closed executor")
        # Count only steps whose event is not ready: reports may lag while the loop handles plans.
        if self.unreported >= MAX_UNFINISHED:
            under_way = [one for one, event, _ in self._launched if not event.ready]
            unfinished = sum(one.epoch == step.epoch for one in (*under_way, *self._waiting))
            if unfinished >= MAX_UNFINISHED:
                raise RuntimeError(
                    f"step {step.number} submitted while {unfinished} are unfinished"
                )
        self._waiting.append(step)
        self.submitted += 1
        self._go_on()

    def close(self) -> None:
        """Waits for the launched steps; their reports may still come. No step follows."""
        if self._closed:
            return
        self._closed = True
        if self._observer is not None:
            self._runner.device.submit(self._observer.close)
        self._runner.device.close()
        if self._masks is not None:
            self._masks.close()

    def _go_on(self) -> None:
        """Launches the waiting steps, up to a step whose masks cannot be known yet."""
        while self._waiting and not self._awaits_masks:
            step, launched = self._waiting.popleft(), None
            self.launched += 1
            try:
                launched = self._runner.launch(step, self._before)
                self._awaits_masks = step.masked is not None
                event = launched.event
            except Exception as error:  # any error belongs to this step's owner
                event = FailedEvent(error)
            self._launched.append((step, event, launched))
            if self._awaits_masks:
                self._sample_masked()
            else:
                event.then(self._loop, self._report_finished)

    def _sample_masked(self) -> None:
        """Samples the step that waits for its masks, if all steps before it were reported."""
        if not self._awaits_masks or len(self._launched) > 1:
            return
        step, event, launched = self._launched[0]
        assert self._masks is not None and launched is not None
        try:
            self._runner.sample_masked(launched, partial(self._masks.fill, step))
        except Exception as error:
            event = FailedEvent(error)
            self._launched[0] = step, event, None
        self._awaits_masks = False
        event.then(self._loop, self._report_finished)

    def _report_finished(self) -> None:
        """Reports every step that has ended, in order. A step that was never launched may have
        called this too early.
        """
        while self._launched and self._launched[0][1].ready:
            step, event, launched = self._launched.popleft()
            try:
                event.wait()  # raises why a launch has failed; a fault of a kernel shows only here
                assert launched is not None
                sampled = launched.take()
                if self._masks is not None:
                    sampled = self._masks.take(step, sampled)
            except Exception as error:
                self._on_error(step, error)
                continue
            self.steps += 1
            self.busy_seconds += event.busy
            self.idle_seconds += event.idle
            self._on_done(step, sampled, event.busy)
        self._sample_masked()
        self._go_on()


log = logging.getLogger(__name__)

NOTHING: Mapping[str, float] = MappingProxyType({})
PAUSE = 0.5  # seconds without a step after which percentiles begin anew


StartExecutor = Callable[
    [Callable[[Step, Sampled, float], None], Callable[[Step, Exception], None]], Executor
]


# (spec, then, slow, released): compiles the grammar `spec` and calls `then` with the error, or "".
# slow: compiling may take long. released: slots whose requests with a grammar have ended.
PrepareGrammar = Callable[[StructuredOutputs, Callable[[str], None], bool, Sequence[int]], None]


def nothing_to_prepare(
    spec: StructuredOutputs, then: Callable[[str], None], slow: bool, released: Sequence[int]
) -> None:
    """The PrepareGrammar of engines without grammars: refuses each of them."""
    then("this engine serves no grammars")


class DeviceDriver:
    """Executes the commands of the core on a device: each Compute by an executor, in order; each
    Compile by `prepare`, each Capture by `background`.

    Arguments:
    - begin: begin(on_done, on_error) makes the executor, on the running loop
    - phases: where core and runner note what a step costs; the driver adds the time to hand the
      result on
    - prepare: compiles grammars
    - background: captures the deferred CUDA graphs; None: there are none
    - start: seconds of the phases of the engine's start
    - kept: memory that outlives this process; the driver writes the page directory. None: the pool
      ends with the process
    - memory: what is given back while the engine sleeps; None: the engine cannot sleep
    - adapters: reads adapters, and puts them into the device's memory; None: the engine serves none
    """

    def __init__(
        self,
        begin: StartExecutor,
        phases: Phases,
        prepare: PrepareGrammar = nothing_to_prepare,
        background: BackgroundCapture | None = None,
        start: Mapping[str, float] = NOTHING,
        kept: KeptMemory | None = None,
        memory: EngineMemory | None = None,
        adapters: AdapterLoads | None = None,
    ) -> None:
        self._adapters = adapters
        self._kept = kept
        self._memory = memory
        self._suspending: Suspend | None = None  # once no step is under way
        self._asleep = False
        self._sleeps: asyncio.Task[None] | None = None  # falls asleep, or wakes up
        self._directory = None if kept is None or kept.opened is None else kept.opened.directory
        self._untouched = True  # no plan has given any page to a request
        self._begin = begin
        self._phases = phases
        self._prepare = prepare
        self._background = background
        self._start = start
        self._unreported = 0
        self._sleep_seconds = {"fall_asleep_seconds": 0.0, "wake_up_seconds": 0.0}  # the last time
        self._quiet_since = 0.0
        self._executor: Executor | None = None
        self._feed: Callable[[Message], None] | None = None

    async def start(self, feed: Callable[[Message], None]) -> None:
        self._feed = feed
        self._executor = self._begin(self._done, self._failed)
        if self._kept is not None and self._memory is not None:
            slept = self._kept.sleep_note()
            if slept is not None:
                self._asleep = True
                await self._suspend(Suspend(*slept))
        if self._kept is not None and self._kept.opened is not None:
            self._kept.watch(asyncio.get_running_loop())
        if self._background is not None:
            self._background.start(self._quiet, lambda: feed(GraphDue()))

    def _quiet(self) -> float:
        """Seconds since the last step ended; 0.0 while there is a step, or while the engine
        sleeps.
        """
        return 0.0 if self._unreported or self._asleep else time.monotonic() - self._quiet_since

    def deliver(self, message: Message) -> None:
        assert self._executor is not None
        match message:
            case Compile():
                self._compile(message)
            case Compute():
                self._compute(message)
            case InvalidatePages():
                assert self._directory is not None
                self._untouched = False
                self._directory.invalidate(message.pages)
            case FillPages():
                assert self._directory is not None
                self._directory.validate(message.chains)
            case MarkPagesUnusable():
                assert self._directory is not None
                self._directory.make_unusable()
            case FindPages():
                self._find_pages()
            case Suspend():
                self._suspending, self._asleep = message, True
                self._suspend_if_quiet()
            case Resume():
                self._sleeps = asyncio.create_task(self._resume())
            case Capture():
                assert self._background is not None
                self._background.capture()
            case LoadAdapter():
                self._load_adapter(message)
            case _:
                raise TypeError(f"a device takes no {type(message).__name__}")

    def _load_adapter(self, message: LoadAdapter) -> None:
        """Reads the adapter. Steps that were submitted before may use the adapter that lies in the
        slot now, so the new one is put there after their launch.
        """
        if self._adapters is None:
            error = "this engine serves no adapters"
            self._feed_event(AdapterRead(message.epoch, message.number, error))
            return
        assert self._executor is not None
        self._adapters.begin(message, self._executor.submitted, self._put_adapters)

    def _put_adapters(self) -> None:
        """Puts adapters that were read into the device's memory, as far as the steps before them
        were launched.
        """
        if self._adapters is not None and self._executor is not None:
            for read in self._adapters.put_ready(self._executor.launched):
                self._feed_event(read)

    def _find_pages(self) -> None:
        """Answers FindPages. Before the first plan of this process the answer is what all ranks
        have agreed on at the start. After it, several ranks have not agreed on what they have
        computed since, so a new epoch of the same processes begins without pages; a single rank
        reads its directory.
        """
        assert self._kept is not None and self._directory is not None
        opened = self._kept.opened
        assert opened is not None
        if not self._directory.belongs_to(self._kept.key):  # an error was found: begin anew
            self._directory.begin(self._kept.key)
            self._untouched = False
        if self._untouched:
            found = opened.found
        elif opened.single_rank:
            found = self._directory.read().verified()
        else:
            found = PageChains.none(self._directory.page_size)
        self._feed_event(FoundPages.of(found))

    def _suspend_if_quiet(self) -> None:
        message = self._suspending
        if message is not None and not self._unreported:
            self._suspending = None
            self._sleeps = asyncio.create_task(self._suspend(message))

    async def _suspend(self, message: Suspend) -> None:
        """Gives memory back on a thread, so that the event loop goes on with heartbeats."""
        began, error = time.monotonic(), ""
        try:
            if self._memory is None or self._kept is None:
                raise RuntimeError("this engine cannot give its memory back")
            self._memory.withdraw()
            await asyncio.to_thread(self._memory.give_back, message.level)
            self._kept.note_sleep(message.level, message.refuses)
        except Exception as failed:
            log.exception("falling asleep failed")
            error = f"falling asleep failed: {failed}"
        self._sleep_seconds["fall_asleep_seconds"] = time.monotonic() - began
        self._feed_event(Suspended(message.level, error, message.refuses))

    async def _resume(self) -> None:
        began, error = time.monotonic(), ""
        try:
            assert self._memory is not None and self._kept is not None
            await asyncio.to_thread(self._memory.take_back)
            self._memory.keep()
            self._kept.forget_sleep()
        except Exception as failed:
            log.exception("waking up failed")
            error = f"waking up failed: {failed}"
        self._sleep_seconds["wake_up_seconds"] = time.monotonic() - began
        self._asleep = False
        self._feed_event(Resumed(error))

    def _compile(self, message: Compile) -> None:
        loop = asyncio.get_running_loop()

        def then(error: str) -> None:
            """Feeds Compiled on the loop; may be called on any thread."""
            compiled = Compiled(message.request_id, error)
            with contextlib.suppress(RuntimeError):  # the stage has stopped meanwhile
                loop.call_soon_threadsafe(self._feed_event, compiled)

        self._prepare(message.spec, then, message.slow, message.released)

    def _feed_event(self, event: Message) -> None:
        assert self._feed is not None
        self._feed(event)

    def _compute(self, message: Compute) -> None:
        assert self._executor is not None
        if not self._unreported and time.monotonic() - self._quiet_since > PAUSE:
            self._phases.begin_anew()
        self._unreported += 1
        self._executor.submit(message.step)

    async def stop(self) -> None:
        if self._sleeps is not None:
            await self._sleeps
        if self._background is not None:
            self._background.close()
        if self._adapters is not None:
            await self._adapters.close()
        if self._executor is not None:
            self._executor.close()
        if self._kept is not None:
            self._kept.close()

    def stats(self) -> dict[str, float]:
        """Statistics: seconds in which the device computed and in which it had no step queued,
        seconds of each phase and of the start, and numbers of CUDA graphs.
        """
        executor = self._executor
        if executor is None:
            return {}
        return {
            "busy_seconds": executor.busy_seconds,
            "idle_seconds": executor.idle_seconds,
            **self._phases.statistics(),
            **self._start,
            "can_sleep": float(self._memory is not None),
            **self._sleep_seconds,
            **(self._background.stats() if self._background is not None else {}),
        }

    def _done(self, step: Step, sampled: Sampled, seconds: float) -> None:
        assert self._feed is not None
        self._unreported -= 1
        self._quiet_since = time.monotonic()
        with self._phases.span("result", step.number):
            self._feed(step_done(step, sampled, seconds))
        self._phases.done(step.number, len(step.slots), step.num_decodes)
        self._suspend_if_quiet()
        self._put_adapters()

    def _failed(self, step: Step, error: Exception) -> None:
        assert self._feed is not None
        self._unreported -= 1
        log.error("step %d of epoch %d", step.number, step.epoch, exc_info=error)
        if self._directory is not None and not isinstance(error, PeerLost):
            self._directory.make_unusable()  # the content of the pages is unknown after a fault
        self._feed(StepFailed(step.epoch, step.number, str(error)))


def step_done(step: Step, sampled: Sampled, seconds: float = 0.0) -> StepDone:
    """Makes the core's event for `step`, whose output is `sampled`."""
    counts, ids, bad = map(pack, (sampled.num_sampled, sampled.ids, sampled.bad))
    return StepDone(
        epoch=step.epoch,
        number=step.number,
        num_sampled=counts,
        token_ids=ids,
        seconds=seconds,
        bad=bad,
        logprobs=sampled.logprobs,
        prompt_logprobs=sampled.prompt_logprobs,
        refused=dict(sampled.refused),
        mask_units=dict(sampled.mask_units),
    )


details = logging.getLogger(DETAILS)

FIRST = 0.5  # seconds that the engine is left to meet its scheduler
QUIET = 0.05  # seconds without a step: a client with one request after the other is not disturbed
GAP = 0.01  # seconds between two captures


class BackgroundCapture:
    """Captures the deferred CUDA graphs of `runner` while the engine is idle; all calls are on the
    event loop.

    Each capture goes through the core (GraphDue -> Capture), as everything does that steps depend
    on, so that a replay of a recording captures it before the same step.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._quiet: Callable[[], float] = lambda: 0.0
        self._due: Callable[[], None] = lambda: None
        self._next: asyncio.TimerHandle | None = None
        self._closed = False
        self._began = 0.0

    def start(self, quiet: Callable[[], float], due: Callable[[], None]) -> None:
        """Begins to look for idle moments.

        - quiet: returns the seconds since the last step, 0.0 while there is one
        - due: asks the core for a capture, which calls `capture` at once or never
        """
        self._quiet, self._due = quiet, due
        self._began = asyncio.get_running_loop().time()
        self._later(FIRST)

    def close(self) -> None:
        """Stops: no capture begins any more. To be called before the device is closed."""
        self._closed = True
        if self._next is not None:
            self._next.cancel()

    def stats(self) -> dict[str, float]:
        """Numbers of CUDA graphs: captured, and deferred."""
        return {"graphs": self._runner.graphs, "graphs_left": self._runner.graphs_deferred}

    def capture(self) -> None:
        """Captures the next deferred graph, if there is one, and looks for an idle moment for
        another.
        """
        if not self._runner.graphs_deferred:
            return
        loop = asyncio.get_running_loop()
        try:
            event = self._runner.capture_next()
        except Exception as error:  # a GPU's captures are made before it returns
            self._failed(error)
            return
        event.then(loop, lambda: self._captured(event))

    def _later(self, seconds: float) -> None:
        if self._runner.graphs_deferred and not self._closed:
            self._next = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        quiet = self._quiet()
        if quiet < QUIET:
            self._later(QUIET - quiet)
        else:
            self._due()

    def _captured(self, event: StepEvent) -> None:
        try:
            event.wait()
        except Exception as error:
            self._failed(error)
            return
        if self._runner.graphs_deferred:
            self._later(GAP)
        else:
            took = asyncio.get_running_loop().time() - self._began
            details.info("all %d CUDA graphs are there, %.1f s later", self._runner.graphs, took)

    def _failed(self, error: Exception) -> None:
        """Stops capturing: without the graphs the engine is slower, not wrong. If the device itself
        has failed, the next step raises and ends the process.
        """
        self._runner.stop_capturing()
        log.warning(
            "capturing CUDA graphs stopped after %d, the others stay uncaptured: %s",
            self._runner.graphs, error, exc_info=error,
        )  # fmt: skip

"""Time of the host for each phase of a step, and profiles for nsys and Perfetto.

    Phases         seconds of each phase: sums, percentiles of the last steps, ranges on a timeline
    StepProfile    --profile N: a torch profiler's trace of N steps, as JSON that Perfetto opens
    NvtxRanges     the same ranges, for nsys

Imports torch only for a profile or NVTX: engines without a model are timed, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step import Step

if TYPE_CHECKING:
    from torch.profiler import profile, record_function

log = logging.getLogger(__name__)

# plan: pages and arrays of a step. pack, upload: arrays of the step for a GPU. attention_plan:
# index arrays of the attention backend; for a step without a graph also scatter_words,
# propose_ngrams and prepare_inputs, which a graph contains. forward, sample: launched, or on a CPU
# computed. masks: of rows with a grammar. result: the ids on their way to the scheduler.
PHASES = ("plan", "pack", "upload", "attention_plan", "forward", "masks", "sample", "result")
HOST = "host"  # all phases of a step together
SAMPLES = 1024  # steps that percentiles are made of: sorting them delays a step
FULL = 7 / 8  # share of the largest batch from which on a decode step counts as full
QUANTILES = {"p50": 0.5, "p99": 0.99}


class TimelineRanges(Protocol):
    """Nested ranges on a timeline, of the calling thread."""

    def push(self, name: str) -> None: ...

    def pop(self) -> None: ...


class NoRanges:
    """Ranges without a timeline."""

    def push(self, name: str) -> None:
        """Does nothing: there is no timeline."""

    def pop(self) -> None:
        """Does nothing: there is no timeline."""


class PhaseSpan:
    """A context manager that times a phase of a step."""

    __slots__ = ("_begin", "_number", "_phase", "_phases", "_ranges")

    def __init__(self, phases: Phases, phase: str, number: int) -> None:
        self._phases = phases
        self._phase = phase
        self._number = number

    def __enter__(self) -> None:
        self._ranges = self._phases.ranges  # may be others at the end
        self._ranges.push(self._phase)
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begin
        self._ranges.pop()
        self._phases.add(self._phase, self._number, seconds)


class Phases:
    """Times of the phases of all steps of a process. Several threads may add, each its own phases
    of a step.

    Attributes:
    - seconds: wall time of the host by phase since the start
    - ranges: timeline; may be replaced at any time
    """

    def __init__(self, ranges: TimelineRanges | None = None, samples: int = SAMPLES) -> None:
        self.ranges: TimelineRanges = ranges or NoRanges()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._samples = samples
        self._at = {phase: index for index, phase in enumerate(PHASES)}
        self._microseconds = np.zeros((len(PHASES), samples), dtype=np.float32)
        self._done = np.zeros(samples, dtype=bool)
        # Full steps: rows, 0 for an unused entry, and microseconds.
        self._rows = np.zeros(samples, dtype=np.int32)
        self._full = np.zeros((len(PHASES), samples), dtype=np.float32)
        self._fulls = self._largest = 0

    def span(self, phase: str, number: int) -> PhaseSpan:
        """Returns a context that times a phase of step `number`; at most once for each step and
        phase.
        """
        return PhaseSpan(self, phase, number)

    @contextmanager
    def range(self, name: str) -> Generator[None]:
        """Returns a context with a range on the timeline that is not timed."""
        ranges = self.ranges
        ranges.push(name)
        try:
            yield
        finally:
            ranges.pop()

    def add(self, phase: str, number: int, seconds: float) -> None:
        """Adds `seconds` to phase `phase` of step `number`."""
        self.seconds[phase] += seconds
        self._microseconds[self._at[phase], number % self._samples] = seconds * 1e6

    def done(self, number: int, rows: int, decodes: int) -> None:
        """Notes that step `number` has ended; it had `rows`, of which `decodes` computed one
        token.
        """
        at = number % self._samples
        self._done[at] = True
        if decodes < rows:
            return
        self._largest = max(self._largest, rows)
        if rows >= FULL * self._largest:
            nth = self._fulls % self._samples
            self._rows[nth] = rows
            self._full[:, nth] = self._microseconds[:, at]
            self._fulls += 1

    def begin_anew(self) -> None:
        """Drops the steps so far from the percentiles."""
        self._done[:] = False
        self._rows[:] = 0
        self._fulls = self._largest = 0

    def statistics(self) -> dict[str, float]:
        """Returns sums, and percentiles in microseconds: of all steps, and of decode steps with at
        least 7/8 of the rows of the largest ("full"). 0 if there is no step yet.
        """
        found = {f"{phase}_seconds": seconds for phase, seconds in self.seconds.items()}
        full = self._full[:, self._rows >= max(FULL * self._largest, 1)]
        done = self._microseconds if self._done.all() else self._microseconds[:, self._done]
        found |= self._percentiles(done, "us")
        found |= self._percentiles(full, "full_us")
        return found | {"full_rows": self._largest, "full_steps": full.shape[1]}

    def _percentiles(self, times: np.ndarray, unit: str) -> dict[str, float]:
        """Returns percentiles of the microseconds [phases, n], by name."""
        names = [f"{phase}_{unit}" for phase in (*PHASES, HOST)]
        if not times.size:
            return {f"{name}_{which}": 0.0 for name in names for which in QUANTILES}
        # np.percentile takes three times as long, while the engine has steps to report.
        ordered = np.sort(np.vstack((times, times.sum(axis=0))), axis=1)
        return {
            f"{name}_{which}": value
            for which, quantile in QUANTILES.items()
            for name, value in zip(names, _quantile(ordered, quantile).tolist(), strict=True)
        }


def _quantile(ordered: np.ndarray, quantile: float) -> np.ndarray:
    """Returns the quantile of each row of [rows, n], sorted ascending: between the two nearest
    values, as np.percentile.
    """
    exact = quantile * (ordered.shape[1] - 1)
    low = int(exact)
    high = min(low + 1, ordered.shape[1] - 1)
    return ordered[:, low] + (ordered[:, high] - ordered[:, low]) * (exact - low)


WARM_STEPS = 20  # with decodes, before the first one that is recorded


def profile_path(settings: Settings, name: str) -> Path | None:
    """Returns the file for the stage `name`, whose folder is created; None without --profile.

    Raises ConfigurationError if the folder cannot be made or written to.
    """
    if not settings.profile:
        return None
    folder = Path(settings.profile_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--profile-dir: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--profile-dir: {folder} cannot be written to")
    return (folder / f"profile-{name}-{os.getpid()}.json").absolute()


class StepProfile:
    """A StepObserver (engine/executor.py) that records `steps` steps into the file `path`."""

    def __init__(self, steps: int, path: Path, phases: Phases) -> None:
        self._path = path
        self._phases = phases
        self._usual = phases.ranges
        self._steps = self._remaining = steps
        self._epoch = -1
        self._decode_steps = 0
        self._recording: profile | None = None

    def before(self, step: Step) -> None:
        """Begins or goes on with the recording; `step` is about to be launched, on this thread."""
        if self._recording is not None:
            if self._remaining == 0:
                self.close()
                return
            self._remaining -= 1
        elif self._remaining and self._warm(step):
            self._recording = self._begin()
            self._remaining -= 1

    def close(self) -> None:
        """Writes what was recorded, if it is not written yet; on the thread of `before`."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        remaining, self._remaining = self._remaining, 0
        self._phases.ranges = self._usual
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels that still run belong to the trace
        recording.stop()
        recording.export_chrome_trace(str(self._path))
        log.info("a profile of %d steps is in %s", self._steps - remaining, self._path)

    def _warm(self, step: Step) -> bool:
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self._decode_steps = 0
        warm = self._decode_steps >= WARM_STEPS
        self._decode_steps += step.num_decodes > 0
        return warm

    def _begin(self) -> profile:
        import torch

        # torch has no public name for _ExperimentalConfig.
        from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Plans are applied and results are sent on other threads than this one.
        threads = _ExperimentalConfig(profile_all_threads=True)
        recording = profile(activities=activities, experimental_config=threads)
        recording.start()
        self._phases.ranges = ProfilerRanges()
        return recording


class NvtxRanges:
    """Ranges for nsys; without a listener a push and a pop take less than a microsecond."""

    def push(self, name: str) -> None:
        """Opens a range of this thread."""
        import torch

        # torch's own code gives this argument no type.
        torch.cuda.nvtx.range_push(name)  # pyright: ignore[reportUnknownMemberType]

    def pop(self) -> None:
        """Closes the innermost range of this thread."""
        import torch

        torch.cuda.nvtx.range_pop()


class _Opened(threading.local):
    """The ranges that a thread has opened, the innermost last."""

    def __init__(self) -> None:
        self.ranges: list[record_function] = []


class ProfilerRanges:
    """Ranges in the trace of a running torch profiler."""

    def __init__(self) -> None:
        self._opened = _Opened()

    def push(self, name: str) -> None:
        """Opens a range of this thread."""
        from torch.profiler import record_function

        opened = record_function(name)
        opened.__enter__()
        self._opened.ranges.append(opened)

    def pop(self) -> None:
        """Closes the innermost range of this thread."""
        self._opened.ranges.pop().__exit__(None, None, None)


def nvtx_if_loaded() -> TimelineRanges:
    """Returns NVTX ranges if torch sees a GPU, else ranges without a timeline."""
    import torch

    return NvtxRanges() if torch.cuda.is_available() else NoRanges()

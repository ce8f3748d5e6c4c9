"""`--profile N`: a torch profiler's trace of N steps, as JSON that Perfetto and Chrome open.

Knows when steps begin, on the thread that launches them; nothing of what a step computes. The rule:
it begins when an epoch has had 20 steps that decode, once in a process.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig  # pyright: ignore[reportPrivateUsage]
from torch.profiler import ProfilerActivity, profile, record_function

from pipeinfer.engine.phases import NoRanges, Phases, TimelineRanges
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step import Step

# torch has no public name for it.


log = logging.getLogger(__name__)

WARM_STEPS = 20  # with decodes, before the first one that is recorded


def profile_path(settings: Settings, name: str) -> Path | None:
    """The file for the stage `name`, if --profile asks for one; its folder is there then.

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
    """Records `steps` steps into the file `path`; see engine/executor.py's Watch."""

    def __init__(self, steps: int, path: Path, phases: Phases) -> None:
        self._path = path
        self._phases = phases
        self._usual = phases.ranges
        self._steps = self._remaining = steps
        self._epoch = -1
        self._decode_steps = 0
        self._recording: profile | None = None

    def before(self, step: Step) -> None:
        """`step` is about to be launched, on this thread."""
        if self._recording is not None:
            if self._remaining == 0:
                self.close()
                return
            self._remaining -= 1
        elif self._remaining and self._warm(step):
            self._recording = self._begin()
            self._remaining -= 1

    def close(self) -> None:
        """Writes what was recorded, if it is not written yet; on the same thread."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        remaining, self._remaining = self._remaining, 0
        self._phases.ranges = self._usual
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is still running belongs to the trace
        recording.stop()
        recording.export_chrome_trace(str(self._path))
        log.info("a profile of %d steps is in %s", self._steps - remaining, self._path)

    def _warm(self, step: Step) -> bool:
        if step.epoch != self._epoch:
            self._epoch = step.epoch
            self._decode_steps = 0
        warm = self._decode_steps >= WARM_STEPS
        self._decode_steps += step.decodes > 0
        return warm

    def _begin(self) -> profile:
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
        # torch's own code gives this argument no type.
        torch.cuda.nvtx.range_push(name)  # pyright: ignore[reportUnknownMemberType]

    def pop(self) -> None:
        """Closes the innermost one."""
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
        opened = record_function(name)
        opened.__enter__()
        self._opened.ranges.append(opened)

    def pop(self) -> None:
        """Closes the innermost one."""
        self._opened.ranges.pop().__exit__(None, None, None)


def nvtx_if_loaded() -> TimelineRanges:
    """NVTX where torch has CUDA and a GPU, else none."""
    return NvtxRanges() if torch.cuda.is_available() else NoRanges()

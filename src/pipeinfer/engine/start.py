"""What an engine's start does at the moment, and where its time went: seconds by phase.

Knows names and a clock; a phase may begin several times, and what is in none of them is nobody's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

# process: Python, the shell and the modules that every stage has, up to the builder. imports: torch
# and what is built on it. checks: settings against the checkpoint. ranks: waited for. weights: read
# and put where they belong. attention: kernels of packages loaded. warm_up: steps that compile and
# load everything else. pool: measured and allocated. graphs: captured. step_times: measured.
# vocabulary: of grammars, waited for.
PHASES = (
    "process", "imports", "checks", "ranks", "weights", "attention", "warm_up", "pool", "graphs",
    "step_times", "vocabulary",
)  # fmt: skip
WORDS = {
    "imports": "loading libraries",
    "checks": "checking the model's configuration",
    "weights": "reading weights",
    "attention": "loading kernels",
    "warm_up": "trying the first steps, which may compile kernels",
    "pool": "reserving memory for tokens",
    "step_times": "measuring how long steps take",
    "vocabulary": "preparing grammars",
}  # what is said of a phase as it begins; graphs are counted, and whoever waits for ranks says so
SHOWN = 0.005  # seconds: what takes less is not worth a word
TICKS = "SC_CLK_TCK"
GIB = 2**30


class Start:
    """seconds: by phase. graphs: how many were captured, of how many; "" where there are none.

    `say(text)` is told what the start does: the phase, and how far it is where that is known."""

    def __init__(
        self,
        say: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.graphs = ""
        self._say = say
        self._clock = clock
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """What runs meanwhile is that phase's."""
        began = self._clock()
        if name in WORDS:
            self._say(WORDS[name])
        try:
            yield
        finally:
            self.took(name, self._clock() - began)

    def took(self, name: str, seconds: float) -> None:
        """So much more of that phase."""
        self.seconds[name] += seconds

    def read(self, done: int, total: int) -> None:
        """`done` of `total` bytes of weights."""
        self._say(f"{WORDS['weights']}, {done / GIB:.2f} of {total / GIB:.2f} GiB")

    def captured(self, done: int, total: int) -> None:
        """`done` of `total` graphs."""
        self.graphs = f"{done} of {total}"
        self._say(f"capturing CUDA graphs, {self.graphs}")

    def __str__(self) -> str:
        """For a person."""
        many = {"graphs": f" ({self.graphs})"}
        return ", ".join(
            f"{name.replace('_', ' ')} {seconds:.2f} s{many.get(name, '')}"
            for name, seconds in self.seconds.items()
            if seconds >= SHOWN
        )

    def statistics(self) -> dict[str, float]:
        """`start_PHASE_seconds`, and of all together."""
        found = {f"start_{name}_seconds": seconds for name, seconds in self.seconds.items()}
        return found | {"start_seconds": sum(self.seconds.values())}


def process_age(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process began; the grain is 10 ms. 0.0 where nobody says so."""
    if not stat.exists():
        return 0.0
    began = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf(TICKS)
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)

"""Where the time of an engine's start goes: seconds by phase, in the order in which they began.

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
SHOWN = 0.005  # seconds: what takes less is not worth a word
TICKS = "SC_CLK_TCK"


class Start:
    """seconds: by phase. graphs: how many were captured, of how many; "" where there are none.

    `show(done, total)` counts them."""

    def __init__(
        self,
        show: Callable[[int, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.graphs = ""
        self._show = show
        self._clock = clock
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """What runs meanwhile is that phase's."""
        began = self._clock()
        try:
            yield
        finally:
            self.took(name, self._clock() - began)

    def took(self, name: str, seconds: float) -> None:
        """So much more of that phase."""
        self.seconds[name] += seconds

    def captured(self, done: int, total: int) -> None:
        """`done` of `total` graphs."""
        self.graphs = f"{done} of {total}"
        if self._show is not None:
            self._show(done, total)

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

"""Processes under measurement: the CPU time of one, and what others take of the machine.

Knows Linux' /proc.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far; the grain is 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Others:
    """How much of the machine others used: `share` of all cores' time, set at the end.

    What was measured inside must have ended, children included, when the block ends. A run beside
    others says little, however fast: several threads that wait for each other suffer most.
    """

    share = 0.0

    def __enter__(self) -> Others:
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        available = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        self.share = max(others / available, 0.0)


def _busy_seconds() -> float:
    """Time that all cores have spent on anything; waiting for disks is not work."""
    user, nice, system, _, _, *rest = (
        int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + sum(rest[:3])) / TICKS


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

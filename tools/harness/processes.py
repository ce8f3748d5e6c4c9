"""Processes beside a tool: helpers that it runs, the CPU time of one, what all others take of the
processor and of GPUs.

Knows Linux' /proc, and nvidia-smi.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

HARNESS = str(Path(__file__).parent)
TICKS = os.sysconf("SC_CLK_TCK")


class Helper:
    """A function of a tool in a process of its own, as a context manager that kills it at the end.

    It prints JSON values, a line each, and may read lines from stdin.

    Attributes:
    - process: runs from the beginning
    """

    def __init__(self, function: str, **options: Any) -> None:
        """function: as "chaos.links:run"; options: its keywords, which JSON can have."""
        self.process = subprocess.Popen(
            [sys.executable, HARNESS, function, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def values(self) -> Iterator[Any]:
        """What it prints, as it comes, until it ends."""
        assert self.process.stdout is not None
        yield from map(json.loads, self.process.stdout)

    def tell(self, value: Any) -> Any:
        """Sends a line, and returns what it prints next. RuntimeError if it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()
        return self.next()

    def next(self) -> Any:
        """The next value that it prints. RuntimeError if it has ended."""
        for value in self.values():
            return value
        raise RuntimeError(f"{self.process.args} ended with code {self.process.wait()}")

    def finish(self, timeout: float | None = None) -> list[Any]:
        """Ends its stdin, and waits for its end: all that it printed and nobody has read."""
        printed, _ = self.process.communicate(timeout=timeout)
        return [json.loads(line) for line in printed.splitlines()]


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


def used_gpu_mib() -> int:
    """What is taken of the memory of all GPUs; 0 where nvidia-smi is not there."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.check_output(command, text=True)
    except FileNotFoundError:
        return 0
    return sum(map(int, said.split()))


def computes(process: psutil.Process) -> bool:
    """Whether it has not ended; one that nobody has waited for yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Processes under measurement: starting a server, and the CPU time of processes.

Knows Linux' /proc and the line that a server prints when it is ready.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from pipeinfer import settings as config

TICKS = os.sysconf("SC_CLK_TCK")
READY = "ready "


class NotReady(RuntimeError):
    """A server ended before it was ready; its own words are on stderr."""


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of the command line of `pipeinfer serve`."""
    kinds = config.flag_types()
    words = [str(settings["model"])] if settings.get("model") else []
    for name, value in settings.items():
        if name == "model":
            continue
        flag = "--" + name.replace("_", "-")
        words += ([flag] if value else []) if kinds[name][0] is bool else [flag, str(value)]
    return words


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The URL in the ready line of a process whose stdout is a pipe. Raises NotReady."""
    output: IO[str] | None = process.stdout
    assert output is not None
    for line in output:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise NotReady(f"the server ended with code {process.wait()}")


class Server:
    """`pipeinfer serve` on a free port, as a context manager; `url` is set when it is ready.

    All its graphs are captured by then, unless `settings` say otherwise. `log`: an open file for
    what it says on stderr, else that is this process's."""

    def __init__(self, settings: Mapping[str, Any], log: IO[str] | None = None) -> None:
        usual = {"log_level": "warning", "all_graphs_first": True}
        words = flags({**usual, **settings, "port": 0})
        command = [sys.executable, "-m", "pipeinfer", "serve", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.url = ""

    def __enter__(self) -> Server:
        try:
            self.url = wait_ready(self.process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.process)


def stop(process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """SIGTERM, and SIGKILL for a process that does not end."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


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

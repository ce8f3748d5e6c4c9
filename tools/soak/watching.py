"""What a server's processes hold at a moment: memory, descriptors, threads; and what they say.

Knows Linux' /proc, heartbeats, and the text of /metrics. A process is known by its stage's id;
"supervisor" is the one that started them, "... child" what a stage has started itself.
"""

from __future__ import annotations

import re
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.processes import cpu_seconds
from harness.server import ServerUnderTest, StageListener

SAMPLE = re.compile(r"^pipeinfer_(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
VALUE = re.compile(r'="([^"]*)"')
BEATS = 1.2  # seconds in which every stage is heard at least twice
PATIENCE = 30.0  # seconds for all stages to be heard


@dataclass(frozen=True)
class Held:
    """By one process. `own`: bytes of memory that no file is behind, which are the process's own;
    a copy that it forks for a moment, as flight recorders do, changes nothing of them, but takes
    most of `private`: what no other process shares. `cpu`: seconds of processor time so far."""

    pid: int
    own: int
    private: int
    descriptors: int
    threads: int
    cpu: float


def held(pid: int) -> Held:
    """What process `pid` holds; OSError if it has ended."""
    place = Path(f"/proc/{pid}")
    rollup = (place / "smaps_rollup").read_text()
    sizes = {name: int(size) << 10 for name, size in re.findall(r"^(\w+): +(\d+) kB", rollup, re.M)}
    return Held(
        pid,
        sizes["Anonymous"],
        sizes["Private_Clean"] + sizes["Private_Dirty"],
        len(list((place / "fd").iterdir())),
        len(list((place / "task").iterdir())),
        cpu_seconds(pid),
    )


def metrics(text: str) -> dict[str, float]:
    """{name, with the values of its labels behind it: value} of the text of /metrics; without
    pipeinfer_, and without histograms. Keys of clients are summed up."""
    found: dict[str, float] = {}
    for name, labels, value in SAMPLE.findall(text):
        values = VALUE.findall(labels)
        if name.startswith("key_"):
            values = values[1:]
        if not name.endswith(("_bucket", "_created")):
            full = " ".join((name, *values))
            found[full] = found.get(full, 0.0) + float(value)
    return found


class Watcher:
    """Looks at a running server, as a context manager. TimeoutError if a stage is silent."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._listener = StageListener(server.process.pid)

    def __enter__(self) -> Watcher:
        self._listener.__enter__()
        self.said(anew=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.__exit__()

    def said(self, anew: bool = False) -> dict[str, dict[str, float]]:
        """The latest statistics of each stage; `anew`: only those that are told from now on, for
        which it waits."""
        listener = self._listener
        listener.hear(0.0)
        if anew:
            listener.beats.clear()
            began = time.monotonic()
            while time.monotonic() < began + BEATS:
                listener.hear(0.2)
            listener.hear_all(began + PATIENCE)
        return {stage: beat.stats for stage, beat in sorted(listener.beats.items())}

    def processes(self) -> dict[str, Held]:
        """What each process holds."""
        names = {self._server.process.pid: "supervisor"}
        names |= {beat.pid: stage for stage, beat in self._listener.beats.items()}
        found: dict[str, Held] = {}
        for process in psutil.process_iter(["ppid"]):  # in the order of their numbers
            pid, parent = process.pid, process.info["ppid"]
            if pid not in names and parent in names:
                names[pid] = f"{names[parent]} child"
            if pid in names:
                name = names[pid]
                while name in found:
                    name += "+"
                with suppress(OSError):  # it has just ended; whose process is missing shows later
                    found[name] = held(pid)
        return found

    def metrics(self) -> dict[str, float]:
        """What the gateway counts."""
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=30) as answer:
            return metrics(answer.read().decode())

    def sample(self) -> dict[str, Any]:
        """All of it, as it is written to a file."""
        said = self.said()
        return {
            "processes": {name: vars(one) for name, one in self.processes().items()},
            "stages": said,
            "metrics": self.metrics(),
        }

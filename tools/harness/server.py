"""A server under attack: its processes, its /health, its log, and what it must not have kept.

Knows `pipeinfer serve` and its ready line; nothing of what is done to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.messages import Heartbeat
from pipeinfer.runtime import supervisor
from pipeinfer.runtime.servers import RunningServer, running_servers

Stage = str  # the id of a stage, such as "gateway-1" or "engine-0-1"
RETURN_SECONDS = 120.0  # seconds for a stage to come back
TRACEBACK = "Traceback (most recent call last)"


def name_of(stage: Stage) -> str:
    """The name of a stage, such as "engine"."""
    return stage.partition("-")[0]


class ServerUnderTest:
    """`pipeinfer serve` with `settings` on a free port, as a context manager.

    url: set when it is ready. words: further words of the command line.
    """

    def __init__(self, settings: Mapping[str, Any], *words: str) -> None:
        handle, self._log = tempfile.mkstemp(prefix="pipeinfer-chaos-", suffix=".log")
        command = [sys.executable, "-m", "pipeinfer", "serve"]
        command += [*supervisor.serve_flags({**settings, "port": 0}), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=handle, text=True)
        os.close(handle)
        self.url = ""

    def __enter__(self) -> ServerUnderTest:
        try:
            self.url = supervisor.wait_ready(self.process)
        except BaseException:
            print(self.log(), file=sys.stderr)
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        supervisor.stop_process(self.process)
        Path(self._log).unlink()

    def stop(self) -> int:
        """Tells it to stop; the exit code."""
        supervisor.stop_process(self.process)
        return self.process.returncode

    def log(self) -> str:
        """What it and its stages have logged so far."""
        return Path(self._log).read_text(errors="replace")

    def tracebacks(self) -> int:
        """How many of them stand in the log."""
        return self.log().count(TRACEBACK)

    def health(self) -> dict[str, Any]:
        """GET /health; OSError if nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:  # 503: it says who is missing
            return json.load(error)

    def pids(self) -> dict[Stage, int]:
        """The process of each stage."""
        return {row["stage"]: row["pid"] for row in self.health()["stages"]}

    def wait(
        self, condition: Callable[[], object], what: str, seconds: float = RETURN_SECONDS
    ) -> None:
        """Looks again and again; TimeoutError names `what`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"never happened: {what}\n{self.log()}")
            time.sleep(0.03)


EMPTY = {
    "gateway": ("running", "waiting", "kept"),
    "tokenizer": ("ledger",),
    "scheduler": ("running", "waiting", "kept", "orphans", "in_flight"),
    "engine": ("slots_used", "steps_in_flight"),
    "detokenizer": ("running", "kept"),
}
# Seconds; what a scheduler's death took with it may be remembered for one minute.
FORGET_SECONDS = 120.0


def running(pid: int) -> RunningServer:
    """The server whose supervisor is process `pid`."""
    return next(one for one in running_servers() if one.pid == pid)


class StageListener:
    """Hears all stages of the server whose supervisor is process `pid`, as a context manager.

    beats: the latest heartbeat of each stage. stages: their ids.
    """

    def __init__(self, pid: int) -> None:
        topology = running(pid).topology
        self.stages = set(topology.ids())
        self.beats: dict[str, Heartbeat] = {}
        self._context = zmq.Context()
        self._caller = ControlClient(topology, self._context)

    def __enter__(self) -> StageListener:
        self._caller.__enter__()
        for stage in self.stages:
            self._caller.listen(stage)
        return self

    def __exit__(self, *_: object) -> None:
        self._caller.__exit__()
        self._context.destroy(linger=0)

    def hear(self, seconds: float) -> None:
        """Waits for heartbeats so long at most, and takes all that have come."""
        while heard := self._caller.receive(seconds):
            for _, beat in heard:
                if isinstance(beat, Heartbeat):
                    self.beats[beat.stage] = beat
            seconds = 0.0

    def left(self) -> dict[str, float]:
        """{stage and statistic: value} of what is not empty, as far as was heard."""
        return _left(self.beats)

    def hear_all(self, deadline: float) -> None:
        """Waits until every stage was heard; TimeoutError at the monotonic time `deadline`."""
        while set(self.beats) != self.stages:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {sorted(self.beats)} were heard")
            self.hear(0.2)


def leftovers(pid: int) -> dict[str, float]:
    """{stage and statistic: value} of what is not empty at last, of every stage of the server
    whose supervisor is process `pid`. TimeoutError if a stage is silent."""
    deadline = time.monotonic() + FORGET_SECONDS
    with StageListener(pid) as listener:
        listener.hear_all(deadline)
        while (left := listener.left()) and time.monotonic() < deadline:
            listener.hear(0.2)
    return left


def _left(latest: dict[str, Heartbeat]) -> dict[str, float]:
    left: dict[str, float] = {}
    for stage, beat in latest.items():
        stats = beat.stats
        if beat.state != "ready":
            left[f"{stage} is {beat.state}"] = 1
            continue
        left |= {f"{stage} {name}": stats[name] for name in EMPTY[beat.name] if stats[name]}
        if beat.name == "engine":
            kept = stats["pages_total"] - stats["pages_free"] - stats["pages_evictable"]
            left |= {f"{stage} pages": kept} if kept else {}
    return left

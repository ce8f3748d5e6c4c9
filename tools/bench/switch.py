"""Switches recording on and off in running stages, and reads the CPU time that they used.

So one set of processes is measured both ways. Knows the channel `control`; nothing of what runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.control import RecordingState, StartRecording, StopRecording
from pipeinfer.messages import Heartbeat
from pipeinfer.runtime.find import running_servers
from pipeinfer.topology import Topology

PATIENCE = 60.0  # seconds in which every stage must have answered


class Switch:
    """All stages of `topology`. Use it as a context manager.

    pids: process id by stage id. recorded: bytes of all recordings that have ended.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._caller = ControlClient(topology, self._context)
        self._name = ""
        self.pids: dict[str, int] = {}
        self.recorded = 0

    def __enter__(self) -> Switch:
        self._caller.__enter__()
        for stage in self._topology.ids():
            self._caller.listen(stage)
        self._until(lambda: len(self.pids) == len(self._topology.ids()), "heartbeats")
        return self

    def __exit__(self, *_: object) -> None:
        self._caller.__exit__()
        self._context.destroy(linger=1_000)

    def start(self, folder: Path) -> None:
        """Returns when every stage records into `folder`. RuntimeError if one does not."""
        self._name = f"{os.getpid()}-{time.time_ns()}"
        self._ask(StartRecording(self._name, str(folder)), "recording")

    def stop(self) -> None:
        """Returns when every recording has ended."""
        self._ask(StopRecording(self._name), "done")

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by stage id; of all threads, to the nanosecond.

        Stages that share a process stand under one of their names.
        """
        # The clock of a process, as clock_getcpuclockid(3) makes it; see also the kernel's
        # posix-timers.h: the complement of the process id, and 2 for "as the scheduler counts".
        stages = {pid: stage for stage, pid in sorted(self.pids.items(), reverse=True)}
        return {stage: time.clock_gettime((~pid << 3) | 2) for pid, stage in stages.items()}

    def _ask(self, message: StartRecording | StopRecording, state: str) -> None:
        waiting = set(self._topology.ids())

        def answered(said: RecordingState) -> None:
            if said.recording != self._name:
                return
            if said.state != state:
                raise RuntimeError(f"{said.stage}: {said.state}: {said.reason}")
            waiting.discard(said.stage)
            self.recorded += said.bytes

        for stage in self._topology.ids():
            self._caller.send(stage, message)
        self._until(lambda: not waiting, state, answered)

    def _until(
        self,
        over: Callable[[], bool],
        what: str,
        answered: Callable[[RecordingState], None] | None = None,
    ) -> None:
        deadline = time.monotonic() + PATIENCE
        while not over():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not every stage said {what} in {PATIENCE:g} s")
            for header, message in self._caller.receive(0.2):
                if isinstance(message, Heartbeat):
                    self.pids[header.sender] = message.pid
                elif isinstance(message, RecordingState) and answered is not None:
                    answered(message)


def topology_here() -> Topology:
    """Of the stages that an LLM in this process has started. RuntimeError if there are none."""
    for server in running_servers():
        if server.pid == os.getpid():
            return server.topology
    raise RuntimeError("this process has started no stages")

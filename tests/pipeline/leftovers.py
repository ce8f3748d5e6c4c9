"""What the stages of a running server remember of requests, as their heartbeats tell it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.messages import Heartbeat
from pipeinfer.runtime.servers import running_servers
from servers import Server

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from harness import server as under_test

PATIENCE = 120.0  # seconds


def leftovers(server: Server) -> dict[str, float]:
    """{stage and statistic: value} of what is not empty at last, of every stage that serves."""
    return under_test.leftovers(server.process.pid)


def statistics(server: Server, stage: str) -> dict[str, float]:
    """Those in the next heartbeat of stage id `stage`."""
    topology = next(s.topology for s in running_servers() if s.pid == server.process.pid)
    deadline = time.monotonic() + PATIENCE
    with zmq.Context() as context, ControlClient(topology, context) as caller:
        caller.listen(stage)
        while time.monotonic() < deadline:
            for _, beat in caller.receive(1.0):
                if isinstance(beat, Heartbeat) and beat.stage == stage:
                    return beat.stats
    raise AssertionError(f"{stage} is silent")

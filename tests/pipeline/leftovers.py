"""What the stages of a running server remember of requests, as their heartbeats tell it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from servers import Server

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from harness import server as under_test

PATIENCE = 120.0  # seconds


def leftovers(server: Server) -> dict[str, float]:
    """{stage and statistic: value} of what is not empty at last, of every stage that serves."""
    return under_test.leftovers(server.process.pid)


def left_after(server: Server, seconds: float) -> dict[str, float]:
    """{stage and statistic: value} of requests that some stage still has after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        over = time.monotonic() >= deadline
        # Each time anew: what was said before `over` was looked at is not heard.
        with under_test.StageListener(server.process.pid) as listener:
            listener.hear_all(time.monotonic() + PATIENCE)
            left = listener.left()
        if over or not left:
            return left


def statistics(server: Server, stage: str) -> dict[str, float]:
    """Those in the next heartbeat of stage id `stage`."""
    deadline = time.monotonic() + PATIENCE
    with under_test.StageListener(server.process.pid) as listener:
        while stage not in listener.beats:
            assert time.monotonic() < deadline, f"{stage} is silent"
            listener.hear(1.0)
    return listener.beats[stage].stats

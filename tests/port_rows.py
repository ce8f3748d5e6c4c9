"""Rows of TCP ports for tests: free, below those that the system gives to connections, and in a
lane of this test worker, so that nobody takes one before it is bound.
"""

from __future__ import annotations

import os
import random
import socket

FIRST, LANE = 10_000, 2_500
LANES = 8  # ends below 32,768, where Linux begins to give ports away


def port_row(count: int) -> int:
    """The first of `count` free ports side by side. RuntimeError if there is no such row."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    lane = FIRST + LANE * (int(worker) % LANES)
    for _ in range(100):
        first = random.randrange(lane, lane + LANE - count)
        if all(_free(port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} free ports side by side from {lane} on")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

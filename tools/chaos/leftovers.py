"""What the stages of a running server still remember of requests, as their heartbeats tell it.

Knows the statistics that are zero where nothing is left (docs/reference/statistics.md).
"""

from __future__ import annotations

import time

import zmq

from pipeinfer.bus.bus import ControlClient
from pipeinfer.messages import Heartbeat
from pipeinfer.runtime.find import running_servers

EMPTY = {
    "gateway": ("running", "waiting"),
    "tokenizer": ("ledger",),
    "scheduler": ("running", "waiting", "kept", "orphans", "in_flight"),
    "engine": ("slots_used", "steps_in_flight"),
    "detokenizer": ("running", "kept"),
}
PATIENCE = 120.0  # seconds; what a scheduler's death took with it may be remembered for one minute


def leftovers(pid: int) -> dict[str, float]:
    """{stage and statistic: value} of what is not empty at last, of every stage of the server
    whose supervisor is process `pid`. TimeoutError if a stage is silent."""
    topology = next(s.topology for s in running_servers() if s.pid == pid)
    latest: dict[str, Heartbeat] = {}
    deadline = time.monotonic() + PATIENCE
    with zmq.Context() as context, ControlClient(topology, context) as caller:
        for stage in topology.ids():
            caller.listen(stage)
        while True:
            for _, beat in caller.receive(0.2):
                if isinstance(beat, Heartbeat):
                    latest[beat.stage] = beat
            left = _left(latest)
            whole = set(latest) == set(topology.ids())
            if whole and not left:
                return left
            if time.monotonic() > deadline:
                if not whole:
                    raise TimeoutError(f"only {sorted(latest)} were heard")
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

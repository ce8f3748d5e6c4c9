"""Busy-poll policy: how long a stage's loop polls after a message before it sleeps until the next.

Knows settings, a topology and Linux' files about this host. The polling itself is the bus reader's
(bus/reader.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeinfer.settings import Settings
from pipeinfer.topology import Identity, Topology

BUSY_POLL_SECONDS = (
    0.005  # seconds; where steps take longer, a process that slept adds little to them
)
CORES_PER_PROCESS = 3  # for each process of a host: its loop, its threads, and those who ask


def busy_poll_seconds(
    settings: Settings, topology: Topology, identity: Identity, root: Path = Path("/")
) -> float:
    """Seconds, 0 for none; see Reader.start.

    An engine looks after itself: on a CPU it needs the cores to compute, on a GPU its loop stays
    awake while steps are in flight.
    """
    if identity.name == "engine" or settings.stay_awake == "never":
        return 0.0
    if settings.stay_awake == "always":
        return BUSY_POLL_SECONDS
    here = topology.entry(identity.id).host
    processes = sum(entry.host == here for entry in topology.entries)
    spare = usable_cores(root) >= CORES_PER_PROCESS * processes
    return BUSY_POLL_SECONDS if spare and _on_gpus(settings, root) else 0.0


def usable_cores(root: Path = Path("/")) -> int:
    """That this process may use, within its control group's quota if it has one."""
    allowed = len(os.sched_getaffinity(0))
    quota = root / "sys/fs/cgroup/cpu.max"
    if quota.exists():
        most, _, period = quota.read_text().partition(" ")
        if most.isdigit():
            allowed = min(allowed, int(most) // int(period))
    return allowed


def _on_gpus(settings: Settings, root: Path) -> bool:
    """Whether engines compute on GPUs, as far as a process can tell that does not import torch."""
    if settings.device == "auto":
        return any((root / "dev").glob("nvidia[0-9]*"))
    return settings.device == "cuda"

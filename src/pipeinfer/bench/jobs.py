"""What the client's processes say to each other: a Job down, and when to begin; Reports up.

Knows what is said; not who does what with it.
"""

from __future__ import annotations

import msgspec

from pipeinfer.bench.endpoint import Endpoint
from pipeinfer.bench.lag import ClientLoad
from pipeinfer.bench.latency import RequestTiming
from pipeinfer.bench.load import Load
from pipeinfer.bench.prompts import CustomDataset, RandomDataset


class WorkerJob(msgspec.Struct, frozen=True):
    """What one process sends, and where."""

    endpoint: Endpoint
    dataset: RandomDataset | CustomDataset
    load: Load


class StartSignal(msgspec.Struct, frozen=True):
    """When all processes begin: time.perf_counter(), which they share."""

    at: float


class WorkerResult(msgspec.Struct, frozen=True):
    """What one process saw."""

    timings: list[RequestTiming]
    client_load: ClientLoad


class WorkerProgress(msgspec.Struct, frozen=True):
    """How far a process is; the first comes when it is ready, the last has its result."""

    done: int = 0
    failed: int = 0
    running: int = 0
    tokens: int = 0
    result: WorkerResult | None = None


def encode_message(message: WorkerJob | StartSignal | WorkerProgress) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message)

"""What the client's processes say to each other: a Job down, and when to begin; Reports up.

Knows what is said; not who does what with it.
"""

from __future__ import annotations

import msgspec

from pipeinfer.bench.endpoint import Endpoint
from pipeinfer.bench.lag import Own
from pipeinfer.bench.latency import Timeline
from pipeinfer.bench.load import Load
from pipeinfer.bench.prompts import Drawn, Listed


class Job(msgspec.Struct, frozen=True):
    """What one process sends, and where."""

    endpoint: Endpoint
    source: Drawn | Listed
    load: Load


class Begin(msgspec.Struct, frozen=True):
    """When all processes begin: time.perf_counter(), which they share."""

    at: float


class Result(msgspec.Struct, frozen=True):
    """What one process saw."""

    lines: list[Timeline]
    own: Own


class Report(msgspec.Struct, frozen=True):
    """How far a process is; the first comes when it is ready, the last has its result."""

    done: int = 0
    failed: int = 0
    running: int = 0
    tokens: int = 0
    result: Result | None = None


def encoded(message: Job | Begin | Report) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message)

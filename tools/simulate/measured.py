"""Steps as recordings of a real run show them: what each computed, and how long it took.

Reads traces of `--record DIR` through tools/replay. Knows no model of step times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeinfer.messages import Plan, Result, Submit, Text, Tokens, Work, unpack
from pipeinfer.settings import ConfigurationError
from replay.codes import CannotReplay
from replay.recording import Entry, Recording, load
from simulate.step_model import attended

FOLLOWS = 0.05  # seconds: a plan that comes later has not been waited for


@dataclass(frozen=True)
class MeasuredStep:
    """The arguments of StepModel.seconds, and the seconds from the end of the step before, or from
    its own launch if that was later, to its end."""

    decodes: int
    contexts: int
    tokens: int
    pairs: int
    seconds: float


def recordings(folder: Path) -> list[Recording]:
    """All traces in `folder`. ConfigurationError if there is none of an engine."""
    try:
        found = [load(path) for path in sorted(folder.glob("*.pitrace"))]
    except CannotReplay as error:
        raise ConfigurationError(str(error)) from None
    if not any(one.identity.name == "engine" for one in found):
        raise ConfigurationError(f"{folder} holds no recording of an engine")
    return found


def steps(recording: Recording) -> Iterator[MeasuredStep]:
    """The steps of an engine, in order."""
    begun: dict[tuple[int, int], float] = {}
    taken: dict[tuple[int, int], float] = {}
    before = 0.0
    for entry in recording.entries:
        message = entry.message
        if entry.kind == "StepNote":
            begun[message.epoch, message.number] = entry.time
        elif entry.kind == "StepDone":
            launched = begun.pop((message.epoch, message.number), entry.time)
            taken[message.epoch, message.number] = entry.time - max(before, launched)
            before = entry.time
        elif isinstance(message, Result):
            seconds = taken.pop((message.epoch, message.number), 0.0)
            if seconds > 0:
                yield _step(message, seconds)


def _step(result: Result, seconds: float) -> MeasuredStep:
    starts, counts = unpack(result.starts), unpack(result.counts)
    one, more = counts == 1, counts > 1
    pairs = attended(starts[more].tolist(), counts[more].tolist())
    contexts = int(starts[one].sum()) + int(one.sum())
    return MeasuredStep(int(one.sum()), contexts, int(counts[more].sum()), pairs, seconds)


def turnaround(recording: Recording) -> float:
    """Median seconds of an engine from sending a result to launching the step planned upon it."""
    waits: list[float] = []
    sent = planned = 0.0
    for entry in recording.entries:
        if isinstance(entry.message, Result):
            sent = entry.time
        elif isinstance(entry.message, Plan):
            planned = entry.time if sent and entry.time - sent < FOLLOWS else 0.0
        elif entry.kind == "StepNote" and planned:
            waits.append(entry.time - sent)
            planned = 0.0
    return float(np.median(waits)) if waits else 0.0


def delivery(found: Sequence[Recording]) -> float:
    """Median seconds from clients to the scheduler and back, of a server's recordings; 0 where the
    gateway, the scheduler or the detokenizer is missing."""
    ways = (
        (_first(found, "gateway", "out", Submit), _first(found, "scheduler", "in", Work)),
        (_first(found, "scheduler", "out", Tokens), _first(found, "gateway", "in", Text)),
    )
    total = 0.0
    for sent, heard in ways:
        delays = [heard[name] - at for name, at in sent.items() if name in heard]
        total += float(np.median(delays)) if delays else 0.0
    # From the end of a step to the scheduler, which learns of it by a message.
    landed = [e.time - e.sent for e in _entries(found, "scheduler") if e.kind == "Result"]
    return total + (float(np.median(landed)) if landed and total else 0.0)


def _entries(found: Sequence[Recording], name: str) -> Iterator[Entry]:
    for recording in found:
        if recording.identity.name == name:
            yield from recording.entries


def _first(found: Sequence[Recording], name: str, direction: str, kind: type) -> dict[str, float]:
    """When the stage `name` first sent or heard a message of `kind` about each request."""
    times: dict[str, float] = {}
    for entry in _entries(found, name):
        if entry.direction == direction and isinstance(entry.message, kind):
            rows = getattr(entry.message, "rows", (entry.message,))
            for row in rows:
                times.setdefault(row.request_id, entry.time)
    return times

"""Steps as recordings of a real run show them: what each computed, and how long it took.

Reads traces of `--record DIR` through pipeinfer.replay. Knows no model of step times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeinfer.messages import Result
from pipeinfer.replay.codes import CannotReplay
from pipeinfer.replay.recording import LoadedTrace, TraceEntry, load
from pipeinfer.settings import ConfigurationError
from pipeinfer.wire import unpack
from simulate.step_model import attended


@dataclass(frozen=True)
class MeasuredStep:
    """The arguments of StepModel.seconds, and the seconds from the end of the step before, or from
    its own launch if that was later, to its end."""

    decodes: int
    contexts: int
    tokens: int
    pairs: int
    seconds: float


def recordings(folder: Path) -> list[LoadedTrace]:
    """All traces in `folder`. ConfigurationError if there is none of an engine."""
    try:
        found = [load(path) for path in sorted(folder.glob("*.pitrace"))]
    except CannotReplay as error:
        raise ConfigurationError(str(error)) from None
    if not any(one.identity.name == "engine" for one in found):
        raise ConfigurationError(f"{folder} holds no recording of an engine")
    return found


def leads(recording: LoadedTrace) -> bool:
    """Whether it is of the rank of an engine that reports to the scheduler."""
    return recording.identity.name == "engine" and recording.identity.rank == 0


def steps(recording: LoadedTrace) -> Iterator[MeasuredStep]:
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


def steps_since(found: Sequence[LoadedTrace], begin: float) -> int:
    """Steps of all engines whose results came after `begin`, those without a row left out."""
    return sum(
        bool(unpack(entry.message.counts).any())
        for recording in found
        if leads(recording)
        for entry in recording.entries
        if isinstance(entry.message, Result) and entry.time > begin
    )


def _step(result: Result, seconds: float) -> MeasuredStep:
    starts, counts = unpack(result.starts), unpack(result.counts)
    one, more = counts == 1, counts > 1
    pairs = attended(starts[more].tolist(), counts[more].tolist())
    contexts = int(starts[one].sum()) + int(one.sum())
    return MeasuredStep(int(one.sum()), contexts, int(counts[more].sum()), pairs, seconds)


def entries(found: Sequence[LoadedTrace], name: str) -> Iterator[TraceEntry]:
    """What all stages called `name` took and gave."""
    for recording in found:
        if recording.identity.name == name:
            yield from recording.entries

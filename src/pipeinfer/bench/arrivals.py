"""When requests arrive: drawn from a Poisson process, or read from a recorded trace.

A trace is JSON lines with `timestamp` (seconds), `input_length` and `output_length` (tokens). Knows
no client.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeinfer.settings import ConfigurationError


class TraceEntry(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=1)]


def poisson_arrivals(
    rate: float, seed: int, requests: int | None = None, seconds: float | None = None
) -> list[float]:
    """Seconds after the start, `rate` a second on average: so many requests, or those of so long.

    The same seed gives the same arrivals, in proportion, at every rate. An infinite rate needs
    `requests`, which all come at once.
    """
    times: Iterable[float] = _poisson(rate, random.Random(seed))
    if seconds is not None:
        times = takewhile(lambda at: at < seconds, times)
    return list(islice(times, requests))


def _poisson(rate: float, source: random.Random) -> Iterable[float]:
    at = 0.0
    while True:
        at += source.expovariate(1.0) / rate
        yield at


def load_trace(path: Path) -> list[TraceEntry]:
    """The lines of a trace in the order of their times, of which the first is 0.

    Raises ConfigurationError that names the line.
    """
    try:
        found = [_entry(path, number, line) for number, line in _lines(path)]
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    if not found:
        raise ConfigurationError(f"{path} has no entries")
    found.sort(key=lambda entry: entry.timestamp)
    start = found[0].timestamp
    return [msgspec.structs.replace(entry, timestamp=entry.timestamp - start) for entry in found]


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    with path.open() as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _entry(path: Path, number: int, line: str) -> TraceEntry:
    try:
        return msgspec.json.decode(line, type=TraceEntry)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path} line {number}: {error}") from None

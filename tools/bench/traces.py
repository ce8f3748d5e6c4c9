"""When requests arrive: drawn from a Poisson process, or read from a recorded trace.

A trace is JSON lines with `timestamp` (seconds), `input_length` and `output_length` (tokens). Knows
no client.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from bench.workload import Span
from pipeinfer.settings import ConfigurationError


class Entry(msgspec.Struct, frozen=True):
    """One line of a trace."""

    timestamp: float
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class Arrival:
    """A request that is due `at` seconds after the start."""

    at: float
    prompt: list[int]
    output: int


def poisson(
    rate: float, requests: int, prompts: Span, outputs: Span, highest_id: int, seed: int
) -> list[Arrival]:
    """`rate` arrivals a second on average; lengths and ids are drawn evenly.

    The same seed gives the same requests, arriving in proportion, at every rate.
    """
    source = random.Random(seed)
    at = 0.0
    arrivals = []
    for _ in range(requests):
        at += source.expovariate(1.0) / rate
        prompt = [source.randint(0, highest_id) for _ in range(prompts.draw(source))]
        arrivals.append(Arrival(at, prompt, outputs.draw(source)))
    return arrivals


def recorded(path: Path, highest_id: int, seed: int, speed: float = 1.0) -> list[Arrival]:
    """The requests of a trace, `speed` times as fast; the prompts' ids are drawn.

    Raises ConfigurationError that names the line.
    """
    source = random.Random(seed)
    return [
        Arrival(
            entry.timestamp / speed,
            [source.randint(0, highest_id) for _ in range(entry.input_length)],
            entry.output_length,
        )
        for entry in entries(path)
    ]


def entries(path: Path) -> list[Entry]:
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


def _entry(path: Path, number: int, line: str) -> Entry:
    try:
        return msgspec.json.decode(line, type=Entry)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path} line {number}: {error}") from None

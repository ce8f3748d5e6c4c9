"""Requests of a simulation: Poisson arrivals, a batch, shared prefixes, or a recorded trace.

Everything follows from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import workload
from pipeinfer.bench.dataset import TokenRange
from pipeinfer.bench.runner import load_trace


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Request `number` comes `at` (virtual seconds) with `prompt` int32 [n]; it wants exactly
    `output` tokens. Its sampled ids are all `sampled_id`, which no prompt has."""

    number: int
    at: float
    prompt: np.ndarray
    output: int

    @property
    def id(self) -> str:
        return f"r{self.number}"

    @property
    def sampled_id(self) -> int:
        return OUTPUT_IDS + self.number


OUTPUT_IDS = 1 << 30  # prompts use ids below


HIGHEST_ID = 10_000  # of prompts


def batch(
    requests: int, prompts: TokenRange, outputs: TokenRange, seed: int, highest_id: int = HIGHEST_ID
) -> Iterator[Arrival]:
    """All at once, in the order in which LLM sends a batch: those that generate most first.

    Lengths and ids are those of `tools/bench offline`, draw by draw, for a model with that
    `highest_id` (lengths are drawn between ids, so they depend on it)."""
    work = workload.uniform(requests, prompts, outputs, highest_id, seed)
    pairs = sorted(zip(work.prompts, work.outputs, strict=True), key=lambda pair: -pair[1])
    for number, (prompt, output) in enumerate(pairs):
        yield Arrival(number, 0.0, np.array(prompt, np.int32), output)


def poisson(
    rate: float, requests: int, prompts: TokenRange, outputs: TokenRange, seed: int
) -> Iterator[Arrival]:
    """`rate` arrivals a second on average; lengths and ids are drawn evenly, nothing is shared."""
    source = np.random.default_rng(seed)
    at = 0.0
    for number in range(requests):
        at += source.exponential(1.0 / rate)
        yield Arrival(number, at, _ids(source, prompts), _draw(source, outputs))


def shared(
    rate: float,
    requests: int,
    prefixes: int,
    prefix_tokens: int,
    prompts: TokenRange,
    outputs: TokenRange,
    seed: int,
) -> Iterator[Arrival]:
    """As poisson(), but each prompt follows one of `prefixes` prefixes, all equally likely."""
    source = np.random.default_rng(seed)
    heads = [_ids(source, TokenRange(prefix_tokens, prefix_tokens)) for _ in range(prefixes)]
    at = 0.0
    for number in range(requests):
        at += source.exponential(1.0 / rate)
        head = heads[int(source.integers(prefixes))]
        prompt = np.concatenate((head, _ids(source, prompts)))
        yield Arrival(number, at, prompt, _draw(source, outputs))


def recorded(path: Path, speed: float, seed: int) -> Iterator[Arrival]:
    """The requests of a trace, `speed` times as fast. Raises ConfigurationError."""
    source = np.random.default_rng(seed)
    for number, entry in enumerate(load_trace(path)):
        prompt = source.integers(0, HIGHEST_ID, entry.input_length, np.int32)
        yield Arrival(number, entry.timestamp / speed, prompt, entry.output_length)


def _draw(source: np.random.Generator, span: TokenRange) -> int:
    return int(source.integers(span.low, span.high + 1))


def _ids(source: np.random.Generator, span: TokenRange) -> np.ndarray:
    return source.integers(0, HIGHEST_ID, _draw(source, span), np.int32)

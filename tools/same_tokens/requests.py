"""The requests: drawn from a seed, the same for every revision and on every machine.

Knows neither pipeinfer nor NumPy: Python's own generator gives the same numbers in all versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

IDS = 256  # of prompts, and of what may stop a request; a checkpoint has a few more
LONGEST_TAIL = 90
PREFIXES = 12
MOST_TOKENS = 80


@dataclass(frozen=True)
class Asked:
    """`knobs`: fields of RequestParams. `leaves_after`: its client goes when it has that many
    output tokens; only those count, because how many more are computed is a matter of batches."""

    name: str
    prompt: list[int]
    knobs: dict[str, Any]
    seed: int
    eos_ids: tuple[int, ...] = ()
    priority: int = 0
    leaves_after: int | None = None
    salt: str = ""


def draw(many: int, seed: int, crowded: bool = True) -> list[Asked]:
    """`many` requests; of a longer list from the same seed they are the first. `crowded`: with
    what only a server with many clients sees, i.e. priorities, salts and clients that leave."""
    prefixes_of = Random(seed)
    prefixes = [_ids(prefixes_of, prefixes_of.randint(16, 180)) for _ in range(PREFIXES)]
    return [_one(Random(f"{seed}:{index}"), index, prefixes, crowded) for index in range(many)]


def _ids(draws: Random, length: int) -> list[int]:
    return [draws.randrange(IDS) for _ in range(length)]


def _one(draws: Random, index: int, prefixes: list[list[int]], crowded: bool) -> Asked:
    prompt: list[int] = []
    if draws.random() < 0.6:
        prefix = draws.choice(prefixes)
        prompt = prefix if draws.random() < 0.5 else prefix[: draws.randint(1, len(prefix))]
    length = draws.choice((0, 1, 15, 16, 17, draws.randint(1, LONGEST_TAIL)))
    prompt = prompt + _ids(draws, max(length, 0 if prompt else 1))
    knobs = _length(draws) | _truncation(draws) | _penalties(draws)
    eos = () if draws.random() < 0.5 else tuple(_ids(draws, 3))
    more: dict[str, Any] = {}
    if crowded:
        more["priority"] = draws.choice((0, 0, 0, 1, -1))
        more["salt"] = draws.choice(("", "", "", "a", "b"))
        if draws.random() < 0.1:
            more["leaves_after"] = draws.randint(1, knobs["max_tokens"])
    return Asked(f"r{index}", prompt, knobs, draws.getrandbits(63), eos, **more)


def _length(draws: Random) -> dict[str, Any]:
    most = draws.randint(1, MOST_TOKENS)
    knobs: dict[str, Any] = {"max_tokens": most}
    if draws.random() < 0.4:
        knobs["stop_token_ids"] = tuple(_ids(draws, draws.randint(1, 20)))
    if draws.random() < 0.3:
        knobs["min_tokens"] = draws.randint(0, most)
    return knobs


def _truncation(draws: Random) -> dict[str, Any]:
    if draws.random() < 0.3:
        return {"temperature": 0.0}
    knobs: dict[str, Any] = {"temperature": draws.choice((0.2, 0.7, 1.0, 1.0, 1.6))}
    if draws.random() < 0.35:
        knobs["top_k"] = draws.choice((1, 2, 5, 40, 200, 1000))
    if draws.random() < 0.35:
        knobs["top_p"] = draws.choice((0.1, 0.5, 0.9, 0.95, 0.999))
    if draws.random() < 0.25:
        knobs["min_p"] = draws.choice((0.01, 0.05, 0.2, 1.0))
    return knobs


def _penalties(draws: Random) -> dict[str, Any]:
    knobs: dict[str, Any] = {}
    if draws.random() < 0.25:
        knobs["repetition_penalty"] = draws.choice((0.8, 1.05, 1.3, 2.0))
    if draws.random() < 0.2:
        knobs["presence_penalty"] = draws.choice((-0.5, 0.5, 1.5))
    if draws.random() < 0.2:
        knobs["frequency_penalty"] = draws.choice((-0.3, 0.4, 1.0))
    return knobs

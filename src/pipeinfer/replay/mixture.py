"""Requests of every kind, drawn from a seed: what a server gets on a bad day.

Knows the HTTP API's fields; sends nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

WORDS = ("count", "from", "pipeline", "engine", "seven", "12", "what is", "copy:", "é", "页", "🙂")
STOPS = (["e"], ["3"], ["ab", "a"], ["\n"], [" t", "10"], ["no such text"])


@dataclass(frozen=True)
class Mixed:
    """One request: path, body, `hang_up` after so many pieces of its stream (None: never), and the
    HTTP statuses that it may get."""

    path: str
    body: dict[str, Any]
    hang_up: int | None = None
    statuses: tuple[int, ...] = (200,)


def mixture(count: int, seed: int) -> list[Mixed]:
    """`count` requests; about 1 in 12 is refused, 1 in 8 abandoned, 1 in 3 has stop strings,
    1 in 20 little time."""
    source = random.Random(seed)
    return [_bad(source) if source.random() < 1 / 12 else _good(source) for _ in range(count)]


def twins(kinds: int = 12, each: int = 3) -> list[Mixed]:
    """Short prompts of whole pages, each several times: as the last token of a prompt is computed
    for each, so is its last page, and the cache gets pages that it has."""
    return [
        Mixed("/v1/completions", {"prompt": [kind] * 96, "max_tokens": 1, "temperature": 0})
        for kind in range(100, 100 + kinds)
        for _ in range(each)
    ]


def _good(source: random.Random) -> Mixed:
    body: dict[str, Any] = {
        "max_tokens": source.randint(1, 48),
        "temperature": source.choice((0, 0, 0.7, 1.0, 1.5)),
        "stream": source.random() < 0.7,
        "ignore_eos": source.random() < 0.5,
        "priority": source.choice((0, 0, 0, 1, -1)),
    }
    optional = {
        "seed": lambda: source.randrange(2**31),
        "stop": lambda: source.choice(STOPS),
        "top_k": lambda: source.choice((1, 5, 40)),
        "top_p": lambda: source.choice((0.5, 0.95)),
        "min_p": lambda: 0.05,
        "min_tokens": lambda: source.randint(1, body["max_tokens"]),
        "stop_token_ids": lambda: [source.randrange(256)],
        "logit_bias": lambda: {str(source.randrange(256)): source.choice((-100, 2.5, 6))},
        "cache_salt": lambda: source.choice(("a", "b")),
        "include_stop_str_in_output": lambda: True,
    }
    for name, draw in optional.items():
        if source.random() < 1 / 3:
            body[name] = draw()
    # A common beginning for many, so that prefixes are found.
    words = [*(("count from 1 to 9 " * 4,) if source.random() < 0.5 else ())]
    words += source.choices(WORDS, k=source.randint(1, 40))
    text = " ".join(words)
    hang_up = source.randint(0, 5) if body["stream"] and source.random() < 1 / 6 else None
    statuses = (200,)
    if source.random() < 1 / 20:
        body["timeout"], statuses = round(source.uniform(0.05, 1.0), 3), (200, 408)
    if source.random() < 0.4:
        return Mixed("/v1/chat/completions", {**body, "messages": _chat(text)}, hang_up, statuses)
    return Mixed("/v1/completions", {**body, "prompt": text}, hang_up, statuses)


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _bad(source: random.Random) -> Mixed:
    """Refused by the gateway, the tokenizer or the scheduler, each in its own way."""
    path = "/v1/completions"
    return source.choice(
        (
            Mixed(path, {"prompt": [1, 2, 999_999], "max_tokens": 4}, statuses=(400,)),
            Mixed(path, {"prompt": "too long " * 2_000, "max_tokens": 4}, statuses=(400,)),
            Mixed(path, {"prompt": "x", "max_tokens": 1_000_000}, statuses=(400,)),
            Mixed(path, {"prompt": "x", "temperature": -1}, statuses=(400,)),
            Mixed("/v1/chat/completions", {"messages": _chat("hi") * 400}, statuses=(400,)),
        )
    )

"""The questions that a soak asks again and again: each has one answer, whoever else is served.

They follow from a seed. Made for the demo model, with every way of sampling; each way has a fixed
seed, so sampled texts repeat as greedy ones do. Knows no server.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from chaos.cases import CHAT, COMPLETION
from pipeinfer.demo import tasks

MANY = 240
PREFIXES = 6  # beginnings of 100 to 400 tokens that many questions share
TOKENS = 24  # of an answer, at most
GREEDY = {"temperature": 0.0}
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05, "top_k": 50},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.8, "logit_bias": {"97": 3, "98": -100}},
    {"temperature": 0.8, "stop": ["1", "7 8", "e"]},
    {"temperature": 0.8, "stop_token_ids": [101, 116]},
    {"temperature": 0.6, "min_tokens": 12},
    {"temperature": 1.0, "guided_regex": "[a-f]{3,9}-[0-9]{2}"},
    {"temperature": 0.8, "guided_choice": ["apples", "apricots", "pears"]},
    {"temperature": 0.8, "allowed_token_ids": [*range(97, 123), 258]},
    {"temperature": 0.8, "bad_words": ["e", "an"]},
    {"temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False},
    {"temperature": 0.0, "stop": ["4 5", "is", "="], "include_stop_str_in_output": True},
)


@dataclass(frozen=True)
class Question:
    """`body`: of a request to `path`, without what changes from one time to the next. `right`: the
    answer that the demo model should give, "" where nobody knows."""

    path: str
    body: dict[str, Any]
    right: str = ""


def questions(seed: int, many: int = MANY) -> list[Question]:
    """So many: half greedy, a third behind a shared beginning, some behind a long one
    of their own."""
    source = random.Random(f"questions {seed}")
    shared = [_turns(source, source.randint(100, 400)) for _ in range(PREFIXES)]
    return [_drawn(source, number, shared) for number in range(many)]


def _drawn(source: random.Random, number: int, shared: list[list[dict[str, str]]]) -> Question:
    asked, right = _task(source)
    messages = [{"role": "user", "content": asked}]
    place = source.random()
    if place < 0.03:
        messages = _turns(source, source.randint(500, 900)) + messages
    elif place < 0.38:
        messages = source.choice(shared) + messages
    body: dict[str, Any] = {"max_tokens": TOKENS, "seed": number, **GREEDY}
    if source.random() < 0.5:
        body |= source.choice(SAMPLING)
        body["max_tokens"] = source.randint(12, TOKENS)
        right = ""
    if place > 0.9:  # the same words as plain text, which no template frames
        return Question(COMPLETION, {"prompt": f"{asked} {right}", **body})
    return Question(CHAT, {"messages": messages, **body}, right)


def _task(source: random.Random) -> tasks.Turn:
    kinds = (
        lambda: tasks.copy_task(source, source.randint(4, 20)),
        lambda: tasks.count_task(source, 8),
        lambda: tasks.sum_task(source),
        lambda: tasks.recall_task(source, source.randint(2, 6)),
    )
    return source.choice(kinds)()


def _turns(source: random.Random, letters: int) -> list[dict[str, str]]:
    """Turns of other tasks, together about so many letters, each of which is a token."""
    made: list[dict[str, str]] = []
    while letters > 0:
        asked, answer = _task(source)
        made += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        letters -= len(asked) + len(answer)
    return made

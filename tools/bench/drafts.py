"""`drafts`: one stream with speculative decoding and without, in turns, by kind of text.

Answers are greedy, end where the model ends them, and both must be the same. Knows the offline
class and its statistics.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from pipeinfer import LLM, SamplingParams

LIGHTHOUSE = (
    "The lighthouse keeper climbs the stairs every evening at six. He carries a lamp, a coat and "
    "a small book. In the book he writes the names of the ships that pass, their colours, and the "
    "weather of the day. On the third of March a storm came from the west and broke two windows "
    "of the tower. The keeper mended them with planks, and wrote the names of four ships that "
    "night. In April the harbour sent new glass, and the planks went into the stove."
)
MINUTES = (
    "The council met on Tuesday in the library. Nine of eleven members were present. The first "
    "matter was the bridge over the mill stream, which has been closed to carts since June. The "
    "builder asked for two hundred pounds and six weeks. The council gave him one hundred and "
    "eighty pounds and eight weeks. The second matter was the school roof, which was put off."
)
LETTER = (
    "Dear Anna, thank you for the seeds. I have put half of them into the bed behind the kitchen "
    "and the other half into pots on the window. The beans came up after nine days, the peas "
    "after twelve. A hare has eaten most of the lettuce, so my brother has built a fence of "
    "willow. When you come in August you will have beans, peas and, if the hare allows it, salad."
)
TEMPERATURE = """\
class Temperature:
    def __init__(self, celsius):
        self.celsius = celsius

    def to_fahrenheit(self):
        return self.celsius * 9 / 5 + 32

    def to_kelvin(self):
        return self.celsius + 273.15
"""
ACCOUNT = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount
"""
STACK = """\
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()
"""
# Of each kind of text, prompts whose answers are measured together.
TASKS = {
    "summary": tuple(f"Summarize this text:\n\n{text}" for text in (LIGHTHOUSE, MINUTES, LETTER)),
    "edit": (
        f"Repeat this text, and write 'captain' wherever it says 'keeper':\n\n{LIGHTHOUSE}",
        f"Repeat this text, and write 'board' wherever it says 'council':\n\n{MINUTES}",
        f"Repeat this text, and write 'Maria' in place of 'Anna':\n\n{LETTER}",
    ),
    "code": (
        f"Write this class again, with a method to_rankine:\n\n{TEMPERATURE}",
        f"Write this class again, with a method close that sets the balance to 0:\n\n{ACCOUNT}",
        f"Write this class again, with a docstring for each method:\n\n{STACK}",
    ),
    "story": (
        "Write a story about a dragon who learns to bake bread.",
        "Describe a walk through a forest in autumn.",
        "Explain to a child why the sea is salty.",
    ),
}
WAYS = {"without": "none", "with": "ngram"}
HEARTBEAT = 3.0  # seconds, longer than statistics take to come


class _Answer(NamedTuple):
    """ids: of the answer. seconds: that it took."""

    ids: tuple[int, ...]
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--tokens", type=int, default=160, help="of each answer at most")
    add("--rounds", type=int, default=3, help="of all tasks and both ways in turn")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens a second of each task, and what was broken: answers that drafts changed."""
    found: dict[str, dict[str, list[_Answer]]] = {task: {way: [] for way in WAYS} for task in TASKS}
    with ExitStack() as servers:
        models = {
            way: servers.enter_context(LLM(**{**settings, "speculate": method}))
            for way, method in WAYS.items()
        }
        for _ in range(options.rounds):
            for task, prompts in TASKS.items():
                for prompt, way in ((prompt, way) for prompt in prompts for way in WAYS):
                    found[task][way].append(_answer(models[way], prompt, options.tokens))
        drafted, accepted = _drafts(models["with"])
    tasks = {task: _compared(ways) for task, ways in found.items()}
    for task, numbers in tasks.items():
        print(f"{task:8} " + ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()))
    print(f"{accepted:.0f} of {drafted:.0f} draft tokens were accepted")
    broken = [
        f"{task}: an answer is another one with drafts"
        for task, ways in found.items()
        if len({tuple(answer.ids for answer in answers) for answers in ways.values()}) > 1
    ]
    return {**tasks, "draft_tokens": drafted, "accepted_draft_tokens": accepted, "broken": broken}


def _answer(llm: LLM, prompt: str, tokens: int) -> _Answer:
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    began = time.perf_counter()
    [output] = llm.chat([[{"role": "user", "content": prompt}]], params)
    return _Answer(tuple(output.outputs[0].token_ids), time.perf_counter() - began)


def _drafts(llm: LLM) -> tuple[float, float]:
    """Draft tokens of all answers, and those that were accepted."""
    time.sleep(HEARTBEAT)
    stats = llm.stats()["scheduler-0"]
    return stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]


def _compared(ways: Mapping[str, list[_Answer]]) -> dict[str, float]:
    """Tokens a second each way, over all answers, and their ratio."""
    rates = {
        way: sum(len(one.ids) for one in answers) / sum(one.seconds for one in answers)
        for way, answers in ways.items()
    }
    ratio = rates["with"] / rates["without"]
    return {**{f"{way}_tokens_per_s": rate for way, rate in rates.items()}, "ratio": ratio}

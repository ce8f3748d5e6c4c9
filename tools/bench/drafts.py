"""`drafts`: one stream with speculative decoding and without, in turns, by kind of text.

Answers are greedy, and both must be the same. Knows the offline class and its statistics.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from pipeinfer import LLM, SamplingParams

LETTER = (
    "The lighthouse keeper climbs the stairs every evening at six. He carries a lamp, a coat and "
    "a small book. In the book he writes the names of the ships that pass, their colours, and the "
    "weather of the day. On the third of March a storm came from the west and broke two windows "
    "of the tower. The keeper mended them with planks, and wrote the names of four ships that "
    "night. In April the harbour sent new glass, and the planks went into the stove."
)
CODE = """\
class Temperature:
    def __init__(self, celsius):
        self.celsius = celsius

    def to_fahrenheit(self):
        return self.celsius * 9 / 5 + 32

    def to_kelvin(self):
        return self.celsius + 273.15
"""
TASKS = {
    "summary": f"Summarize this text in five sentences, in its own words:\n\n{LETTER}",
    "edit": f"Repeat this text, and write 'captain' wherever it says 'keeper':\n\n{LETTER}",
    "code": f"Write a class Length like this class, in metres, feet and miles:\n\n{CODE}",
    "story": "Write a story about a dragon who learns to bake bread.",
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
    add("--tokens", type=int, default=160, help="of each answer")
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
            for task, way in ((task, way) for task in TASKS for way in WAYS):
                found[task][way].append(_answer(models[way], TASKS[task], options.tokens))
        drafted, accepted = _drafts(models["with"])
    tasks = {task: _compared(ways) for task, ways in found.items()}
    for task, numbers in tasks.items():
        print(f"{task:8} " + ", ".join(f"{name} {value:.2f}" for name, value in numbers.items()))
    print(f"{accepted:.0f} of {drafted:.0f} draft tokens were accepted")
    broken = [
        f"{task}: an answer is another one with drafts"
        for task, ways in found.items()
        if len({answer.ids for answers in ways.values() for answer in answers}) > 1
    ]
    return {**tasks, "draft_tokens": drafted, "accepted_draft_tokens": accepted, "broken": broken}


def _answer(llm: LLM, prompt: str, tokens: int) -> _Answer:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    [output] = llm.chat([[{"role": "user", "content": prompt}]], params)
    return _Answer(tuple(output.outputs[0].token_ids), time.perf_counter() - began)


def _drafts(llm: LLM) -> tuple[float, float]:
    """Draft tokens of all answers, and those that were accepted."""
    time.sleep(HEARTBEAT)
    stats = llm.stats()["scheduler-0"]
    return stats["draft_tokens_total"], stats["accepted_draft_tokens_total"]


def _compared(ways: Mapping[str, list[_Answer]]) -> dict[str, float]:
    """Tokens a second each way, and their ratio."""
    rates = {
        way: statistics.median(len(one.ids) / one.seconds for one in answers)
        for way, answers in ways.items()
    }
    ratio = rates["with"] / rates["without"]
    return {**{f"{way}_tokens_per_s": rate for way, rate in rates.items()}, "ratio": ratio}

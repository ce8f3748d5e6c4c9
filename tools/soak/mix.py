"""What is sent: request `number` of a soak, which follows from the seed alone.

Good ones, ones whose client hangs up, bad ones, ones whose time is over too soon, and hostile
ones, in fixed proportions. Knows no server and no answer.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from chaos import cases, wire
from chaos.cases import CASES, CHAT, Case
from soak.questions import Question

Kind = Literal["good", "hang up", "bad", "time out", "hostile"]
PARTS: dict[Kind, int] = {"good": 84, "hang up": 10, "bad": 5, "time out": 2, "hostile": 1}
LONG = {"max_tokens": 400, "ignore_eos": True, "skip_special_tokens": False}  # tokens
EARLY = 0.3  # of those that hang up: before there is any answer
# Hostile cases that cost neither side much, and whose answer says how it must have been counted.
CHEAP = (
    "nested at the bound", "nested beyond the bound", "nested near the stack's end",
    "tool_calls near the stack's end", "small repetition_penalty", "parameters at their edges",
    "parameters beyond their edges", "all ids stop", "as many stop ids as may be",
    "prompts beyond the bound", "prompt that just may fit", "half a character",
    "stop strings beyond the bound", "17 stop strings", "broken gzip", "malformed requests",
    "half-closed", "dropped connections",
)  # fmt: skip
LAST = b'"priority": 2147483647'  # whose client waits while any other does


@dataclass(frozen=True)
class Asked:
    """One request. `question`: of a good one. `hold`: of one that hangs up, after how many pieces;
    0 is before the first byte of an answer. `wanted`: the status of a bad one. `keyed`: whether it
    counts as a request of a key. `kept`: its connection is used again. `case`: of a hostile one."""

    kind: Kind
    content: bytes
    question: int = -1
    hold: int = 0
    wanted: int = 200
    keyed: bool = True
    kept: bool = True
    case: Case | None = None


def drawn(seed: int, number: int, questions: list[Question]) -> Asked:
    """Request `number`."""
    source = random.Random(f"{seed} {number}")
    [kind] = source.choices(list(PARTS), list(PARTS.values()))
    if kind == "good":
        return _good(source, questions)
    if kind == "bad":
        return source.choice(bad())
    if kind == "hostile":
        return source.choice(hostile())
    body = source.choice(questions).body
    body = {"messages": [{"role": "user", "content": "hi"}], **body, **LONG}
    for name in ("prompt", "stop", "stop_token_ids", "include_stop_str_in_output"):
        body.pop(name, None)
    if kind == "time out":
        body |= {"timeout": source.choice((0.001, 0.02, 0.1)), "stream": source.random() < 0.5}
        return Asked(kind, _post(CHAT, body), kept=source.random() < 0.7)
    if source.random() < EARLY:
        body["stream"] = source.random() < 0.5
        return Asked(kind, _post(CHAT, body, {"Expect": "100-continue"}))
    return Asked(kind, _post(CHAT, {**body, "stream": True}), hold=source.randint(1, 5))


def plain(questions: list[Question], number: int) -> Asked:
    """A question as it is."""
    question = questions[number]
    return Asked("good", _post(question.path, question.body), number)


def _good(source: random.Random, questions: list[Question]) -> Asked:
    number = source.randrange(len(questions))
    question = questions[number]
    body = dict(question.body)
    if source.random() < 0.6:
        body["stream"] = True
        if source.random() < 0.3:
            body["stream_options"] = {"include_usage": True}
    if source.random() < 0.2:
        body["priority"] = source.randint(-3, 3)
    if source.random() < 0.15:  # nothing of it is in the cache, and nobody else will find it there
        body["cache_salt"] = f"{source.getrandbits(64):x}"
    if source.random() < 0.3:
        body["timeout"] = 300.0
    return Asked("good", _post(question.path, body), number, kept=source.random() < 0.8)


@cache
def bad() -> tuple[Asked, ...]:
    """Each of the bad requests."""
    wanted = (
        (400, cases.chat(temperature="hot")),
        (400, cases.chat(messages="hello")),
        (400, cases.chat(max_tokens=-1)),
        (400, cases.chat(n=0)),
        (400, cases.chat(tools=[{"type": "function"}])),
        (404, cases.chat(model="somebody-else")),
        (400, cases.completion(prompt="a" * 5000)),
        (400, cases.completion(prompt=[97, cases.VOCABULARY])),
        (400, cases.completion(prompt="abc", stop=[""])),
        (400, wire.request(CHAT, b'{"messages": [')),
        (415, wire.request(CHAT, b"{}", {"Content-Encoding": "br"})),
        (404, wire.request("/v1/nothing", b"{}")),
    )
    of_a_key = (Asked("bad", content, wanted=status) for status, content in wanted)
    return (*of_a_key, Asked("bad", wire.request(CHAT, method="GET"), wanted=405, keyed=False))


@cache
def hostile() -> tuple[Asked, ...]:
    """Each request of the cheap hostile cases that is answered however much others ask for."""
    chosen = [case for case in CASES if case.name in CHEAP]
    assert len(chosen) == len(CHEAP), "a case has another name now"
    contents = [(case, content) for case in chosen for content in case.build()]
    served = [(case, content) for case, content in contents if LAST not in content]
    assert len(served) == len(contents) - 1, "it is written in another way now"
    return tuple(Asked("hostile", content, case=case) for case, content in served)


def _post(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    return wire.request(path, json.dumps(body).encode(), headers)

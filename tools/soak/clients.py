"""`clients`: a process of clients that send their share of a soak's requests and count the answers.

Runs beside a command. Each second it prints how many are done, and at the end a line of JSON: the
counts, what was wrong, and, with --learn, the answers to all questions, which it then asked one
after another, with each bad and each hostile request once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvloop

from chaos import wire
from soak.requests import (
    MANY,
    Answer,
    Asked,
    Lines,
    bad,
    drawn,
    hostile,
    plain,
    questions,
)

EVERY = 1.0  # seconds between lines
ENOUGH = 20  # wrong answers, after which it ends: it would be more of the same


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--url", required=True)
    parser.add_argument("--seed", type=int, default=0, help="of questions and requests")
    parser.add_argument("--questions", type=int, default=MANY)
    parser.add_argument("--share", type=int, nargs=3, metavar=("FROM", "TO", "STEP"))
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.0, help="begin none later; 0: no limit")
    parser.add_argument("--expected", type=Path, help="file with the answers to all questions")
    parser.add_argument("--learn", action="store_true")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Prints what it did."""
    uvloop.run(_run(options))
    return {}


class Clients:
    """`done`: requests. `counts`: of what the server should have counted as well; see counted().
    `wrong`: what should not have come. `answers`: texts and ends by question, if they are learnt.
    """

    def __init__(self, origin: wire.Origin, expected: list[list[str]] | None) -> None:
        self._lines, self._expected = Lines(origin), expected
        self.done = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.answers: dict[int, tuple[str, str]] = {}

    async def loop(self, requests: Iterator[Asked], until: float) -> None:
        """One after another, until there are none, or the time is over."""
        for asked in requests:
            if time.monotonic() > until or len(self.wrong) >= ENOUGH:
                return
            try:
                answer = await self._lines.ask(asked)
            except (OSError, TimeoutError, EOFError, wire.Failed) as error:
                name = asked.kind if asked.case is None else asked.case.name
                self.wrong.append(f"{name}: {error!r}")
                self.counts["lost"] += 1
            else:
                self.counts.update(counted(asked, answer))
                self._look(asked, answer)
            self.done += 1

    def close(self) -> None:
        """Its connections."""
        self._lines.close()

    def _look(self, asked: Asked, answer: Answer) -> None:
        wrong = unexpected(asked, answer)
        if asked.kind == "good" and not wrong:
            if self._expected is None:
                self.answers[asked.question] = answer.text, answer.finish
            elif [answer.text, answer.finish] != self._expected[asked.question]:
                was = self._expected[asked.question]
                wrong = f"question {asked.question}: {answer}, first it was {was}"
        if wrong and len(self.wrong) < ENOUGH:
            self.wrong.append(wrong)


def counted(asked: Asked, answer: Answer) -> list[str]:
    """The names under which a request counts. key ...: as the request of a key, by its outcome;
    end ...: of a completion; bad: as no HTTP; maybe abort: if it had become a request by then."""
    names = [f"asked {asked.kind}"]
    if asked.kind == "hang up":
        return [*names, "key abort", "end abort" if asked.hold else "maybe abort"]
    if answer.status == 0 or not asked.keyed:
        return names
    if answer.code == "bad_request":
        return [*names, "bad"]
    if answer.status == 200:
        return [*names, "key ok", f"end {answer.finish}"] if answer.finish else names
    names.append("key error" if answer.status >= 500 else "key refused")
    return [*names, "end abort"] if answer.status == 408 else names


def unexpected(asked: Asked, answer: Answer) -> str:
    """What is wrong with an answer, apart from its text; "" if nothing is."""
    said = f"{asked.kind}: {answer}"
    if asked.case is not None:
        named = f"{asked.case.name}: {answer}"
        return "" if str(answer.status) in asked.case.expected - {"429"} else named
    if asked.kind == "time out":
        ended = answer.finish == "abort" if answer.status == 200 else answer.code == "timeout"
        return "" if ended else said
    if asked.kind == "good":
        ended = answer.status == 200 and answer.finish in ("stop", "length")
        return "" if ended else said
    wanted = {0, 200} if asked.kind == "hang up" else {asked.wanted}
    return "" if answer.status in wanted else said


async def _run(options: argparse.Namespace) -> None:
    known = questions(options.seed, options.questions)
    expected = json.loads(options.expected.read_text()) if options.expected else None
    clients = Clients(wire.Origin.of(options.url), expected)
    if options.learn:
        everything = [plain(known, number) for number in range(len(known))]
        requests: Iterator[Asked] = iter([*everything, *bad(), *hostile()])
    else:
        numbers = itertools.islice(itertools.count(options.share[0]), 0, None, options.share[2])
        share = itertools.takewhile(lambda number: number < options.share[1], numbers)
        requests = (drawn(options.seed, number, known) for number in share)
    until = time.monotonic() + options.seconds if options.seconds else float("inf")
    tasks = [asyncio.create_task(clients.loop(requests, until)) for _ in range(options.concurrency)]
    while any(not task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=EVERY)
        print(clients.done, flush=True)
    clients.close()
    for task in tasks:
        task.result()
    said = {"counts": clients.counts, "wrong": clients.wrong, "answers": clients.answers}
    print(json.dumps(said), flush=True)

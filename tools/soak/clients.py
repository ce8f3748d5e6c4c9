"""Clients that send their share of a soak's requests and count the answers, in helper processes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from harness import raw_http
from harness.processes import Helper
from soak.requests import Answer, Asked, Lines, bad, drawn, hostile, plain, questions

EVERY = 1.0  # seconds between lines
ENOUGH = 20  # wrong answers, after which it ends: it would be more of the same


def send(
    url: str,
    mix: tuple[int, int],
    share: tuple[int, int, int] | None,
    concurrency: int,
    seconds: float,
    expected: str,
) -> None:
    """A helper that sends requests of the mix.

    It prints each second how many are done, and at the end the counts, what was wrong, and the
    answers to all questions if there is no share.

    Args:
    - mix: the seed of questions and requests, and how many questions
    - share: numbers of requests: the first, the end, the step; None: each question, one after
      another, and each bad and each hostile request once
    - seconds: begin none later; 0: no limit
    - expected: a file with the answers to all questions, "" for none
    """
    uvloop.run(_send(url, mix, share, concurrency, seconds, expected))


class Clients:
    """`done`: requests. `counts`: of what the server should have counted as well; see counted().
    `wrong`: what should not have come. `answers`: texts and ends by question, if they are learnt.
    """

    def __init__(self, address: raw_http.Address, expected: list[list[str]] | None) -> None:
        self._lines, self._expected = Lines(address), expected
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
            except (OSError, TimeoutError, EOFError, raw_http.Failed) as error:
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


async def _send(
    url: str,
    mix: tuple[int, int],
    share: tuple[int, int, int] | None,
    concurrency: int,
    seconds: float,
    expected: str,
) -> None:
    known = questions(*mix)
    answers = json.loads(Path(expected).read_text()) if expected else None
    clients = Clients(raw_http.Address.of(url), answers)
    if share is None:
        everything = [plain(known, number) for number in range(len(known))]
        requests: Iterator[Asked] = iter([*everything, *bad(), *hostile()])
    else:
        requests = (drawn(mix[0], number, known) for number in range(*share))
    until = time.monotonic() + seconds if seconds else float("inf")
    tasks = [asyncio.create_task(clients.loop(requests, until)) for _ in range(concurrency)]
    while any(not task.done() for task in tasks):
        await asyncio.wait(tasks, timeout=EVERY)
        print(clients.done, flush=True)
    clients.close()
    for task in tasks:
        task.result()
    said = {"counts": clients.counts, "wrong": clients.wrong, "answers": clients.answers}
    print(json.dumps(said), flush=True)


class Fleet:
    """Helpers that send(), each with these options, as a context manager.

    Attributes, after `wait`:
    - counts, wrong: of all
    - answers: by question
    """

    def __init__(self, options: Sequence[Mapping[str, Any]]) -> None:
        self._helpers = [Helper("soak.clients:send", **one) for one in options]
        self._done = [0] * len(options)
        self._reports: list[dict[str, Any]] = []
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(len(options))
        ]
        for reader in self._readers:
            reader.start()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.answers: dict[int, list[str]] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self._helpers:
            helper.process.kill()
            helper.process.wait()
        for reader in self._readers:
            reader.join()

    @property
    def done(self) -> int:
        """Requests of all, as of a second ago."""
        return sum(self._done)

    def running(self) -> bool:
        """Whether any of them goes on."""
        return any(reader.is_alive() for reader in self._readers)

    def wait(self) -> None:
        """Until they end; RuntimeError for one that did not print what it did."""
        for reader in self._readers:
            reader.join()
        if len(self._reports) < len(self._helpers):
            raise RuntimeError("a process of clients ended early")
        for report in self._reports:
            self.counts.update(report["counts"])
            self.wrong += report["wrong"]
            self.answers |= {int(number): answer for number, answer in report["answers"].items()}

    def _read(self, number: int) -> None:
        for value in self._helpers[number].values():
            if isinstance(value, int):
                self._done[number] = value
            else:
                self._reports.append(value)

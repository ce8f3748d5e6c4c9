"""`attack`: one client sends one case of chaos/cases.py again and again, on a few connections.

Runs beside a command, in a process of its own. Prints when it begins (monotonic seconds), after
its requests are built, and at the end a line of JSON: how many were sent, the statuses, and its
own processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import uvloop

from chaos import wire
from chaos.cases import CASES, Case

PAUSE = 0.005  # seconds after a connection was refused
EXAMPLES = 3  # of answers that nobody expected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--url", required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--key", default="", help="an API key")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Until its time is over; prints what it did."""
    case = next(case for case in CASES if case.name == options.case)
    attack = Attack(case, wire.Origin.of(options.url), options.key)
    uvloop.run(attack.run(options.seconds))
    return {}


class Attack:
    """One case against a server. `statuses`: "200" and so on, "closed" without an answer, "cut" for
    what was under way when the time was over."""

    def __init__(self, case: Case, origin: wire.Origin, key: str) -> None:
        self._case, self._origin = case, origin
        self._requests = [_keyed(content, key) for content in case.build()]
        self.statuses: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def run(self, seconds: float) -> None:
        """Sends for so long, then cuts what is under way."""
        began, cpu = time.monotonic(), time.process_time()
        print(began, flush=True)
        numbers = itertools.count()
        tasks = [asyncio.create_task(self._loop(numbers)) for _ in range(self._case.connections)]
        _done, running = await asyncio.wait(tasks, timeout=seconds)
        for task in running:
            task.cancel()
        await asyncio.wait(tasks)
        if set(self.statuses) == {"cut"} and "cut" not in self._case.expected:
            self.unexpected.append("nobody was answered")
        for task in tasks:
            if not task.cancelled():
                task.result()
        said = {
            "sent": self.statuses.total(),
            "statuses": dict(self.statuses),
            "unexpected": self.unexpected,
            "cpu": round((time.process_time() - cpu) / (time.monotonic() - began), 3),
        }
        print(json.dumps(said), flush=True)

    async def _loop(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            content = self._requests[number % len(self._requests)]
            try:
                answer = await self._case.send(self._origin, content)
            except asyncio.CancelledError:
                self.statuses["cut"] += 1
                raise
            except OSError:
                self._count("closed", "")
                await asyncio.sleep(PAUSE)
            else:
                self._count(str(answer.status), answer.body[:300].decode(errors="replace"))

    def _count(self, status: str, text: str) -> None:
        """Of an answer, or of none."""
        self.statuses[status] += 1
        if status not in self._case.expected and len(self.unexpected) < EXAMPLES:
            self.unexpected.append(f"{status} {text}")


def _keyed(content: bytes, key: str) -> bytes:
    first, end, rest = content.partition(b"\r\n")
    if not key or not end:
        return content
    return first + end + f"Authorization: Bearer {key}\r\n".encode() + rest

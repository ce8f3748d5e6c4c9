"""`pester`: a few requests a second, each of a case of chaos/cases.py, drawn from a seed.

Runs beside a command, in a process of its own, until its stdin ends. Then it prints a line of JSON:
the statuses ("cut": no answer within some seconds), and answers that their cases do not expect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import uvloop

from chaos import wire
from chaos.cases import CASES, Case
from chaos.streams import TOOL

LAST = 1.0  # seconds for answers that are missing at the end
PATIENCE = 12.0  # seconds for an answer; a slow request takes longer to be sent
EXAMPLES = 10  # of answers that nobody expected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--storm-seed", type=int, default=0)


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Until stdin ends; prints what it did."""
    pest = Pest(wire.Origin.of(options.url), options.rate, random.Random(options.storm_seed))
    uvloop.run(pest.run())
    said = {"statuses": dict(sorted(pest.statuses.items())), "unexpected": pest.unexpected}
    print(json.dumps(said), flush=True)
    return {}


class Pest:
    """`statuses`: how many of each. Cases that need a key without limits are left out."""

    def __init__(self, origin: wire.Origin, rate: float, source: random.Random) -> None:
        self._origin, self._rate, self._random = origin, rate, source
        self._cases = [case for case in CASES if not case.unlimited]
        self._built: dict[str, list[bytes]] = {}
        self.statuses: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def run(self) -> None:
        """Sends at its rate, whether or not answers come."""
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, ended.set)  # nothing is ever said there
        sent: set[asyncio.Task[None]] = set()
        while not ended.is_set():
            case = self._random.choice(self._cases)
            requests = self._built.get(case.name) or self._built.setdefault(case.name, case.build())
            sent.add(asyncio.create_task(self._send(case, self._random.choice(requests))))
            sent = {task for task in sent if not task.done() or task.result()}
            try:
                await asyncio.wait_for(ended.wait(), self._random.expovariate(self._rate))
            except TimeoutError:
                continue
        _done, late = await asyncio.wait(sent, timeout=LAST)
        for task in late:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)
        for task in sent - late:
            task.result()  # raises what ended it
        self.statuses["cut"] += len(late)

    async def _send(self, case: Case, content: bytes) -> None:
        try:
            answer = await asyncio.wait_for(case.send(self._origin, content), PATIENCE)
        except TimeoutError:
            self.statuses["cut"] += 1
        except OSError as error:
            self._count(case, "closed", str(error))
        else:
            self._count(case, str(answer.status), answer.body[:300].decode(errors="replace"))

    def _count(self, case: Case, status: str, text: str) -> None:
        self.statuses[status] += 1
        if status not in case.expected and len(self.unexpected) < EXAMPLES:
            self.unexpected.append(f"{case.name}: {status} {text}")


class Hostile:
    """A `pester` in a process of its own, as a context manager; none with a rate of 0.

    statuses, broken: what it told at its end.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._words = ["pester", "--rate", str(rate), "--storm-seed", str(seed)]
        self._rate = rate
        self._process: subprocess.Popen[str] | None = None
        self.statuses: dict[str, int] = {}
        self.broken: list[str] = []

    def __enter__(self) -> Hostile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def begin(self, url: str) -> None:
        """From now on requests are sent."""
        if self._rate:
            self._process = subprocess.Popen(
                [sys.executable, TOOL, *self._words, "--url", url],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip

    def end(self) -> None:
        """Returns when everything that was sent is over."""
        if self._process is None:
            return
        printed, _ = self._process.communicate()
        self._process = None
        said = json.loads(printed)
        self.statuses = said["statuses"]
        self.broken = [f"unexpected answer: {text}" for text in said["unexpected"]]

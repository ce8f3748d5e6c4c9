"""`hostile`: while one client sends the worst that it may, eight others' streams must go on.

A real server with the demo model. The streams' longest gap is taken in calm first; then each case
of chaos/cases.py is sent in a loop from a process of its own. Broken: a gap more than 0.5 s longer
than in calm, a failed stream, a restarted process, an answer of another status than expected.

`storm` has a hostile client, too, which sends a few requests of all cases a second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from chaos.cases import CASES, Case
from chaos.streams import Streams, StreamTimes
from harness import raw_http
from harness.processes import Helper
from harness.server import ServerUnderTest
from pipeinfer.gateway.api_keys import new_key

PAUSE = 0.005  # seconds after a connection was refused
EXAMPLES = 10  # of answers that nobody expected
PATIENCE = 12.0  # seconds for an answer to one of a few requests; slow ones take longer to be sent
FIRST = 60.0  # seconds for the first answer to any request of a case, on a busy machine
LAST = 1.0  # seconds for answers that are missing when no more requests are sent


class HostileClient:
    """Sends requests of cases, and counts what comes back.

    Attributes:
    - statuses: how many answers had each: "200" and so on, "closed" without an answer, "cut" for
      what was under way when the time was over
    - unexpected: answers that their cases do not expect
    """

    def __init__(self, url: str, key: str = "") -> None:
        self._address, self._key = raw_http.Address.of(url), key
        self._built: dict[str, list[bytes]] = {}
        self.statuses: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self._answered = asyncio.Event()

    def requests(self, case: Case) -> list[bytes]:
        """Those of a case, built once."""
        if case.name not in self._built:
            self._built[case.name] = [_keyed(content, self._key) for content in case.build()]
        return self._built[case.name]

    async def send(self, case: Case, content: bytes) -> bool:
        """One request and its answer; False if the connection ended without one."""
        try:
            answer = await case.send(self._address, content)
        except (asyncio.CancelledError, TimeoutError):
            self.statuses["cut"] += 1
            raise
        except OSError as error:
            self._count(case, "closed", str(error))
            return False
        self._count(case, str(answer.status), answer.body[:300].decode(errors="replace"))
        return True

    async def send_one_case(self, case: Case, seconds: float) -> None:
        """Its requests again and again, on as many connections as it says; longer if nobody is
        answered in that time."""
        numbers = itertools.count()

        async def loop() -> None:
            contents = self.requests(case)
            for number in numbers:
                if not await self.send(case, contents[number % len(contents)]):
                    await asyncio.sleep(PAUSE)

        tasks = [asyncio.create_task(loop()) for _ in range(case.connections)]
        await asyncio.wait(tasks, timeout=seconds)
        if "cut" not in case.expected:
            answered = asyncio.create_task(self._answered.wait())
            await asyncio.wait(
                {answered, *tasks}, timeout=FIRST, return_when=asyncio.FIRST_COMPLETED
            )
            answered.cancel()
        await _end(tasks, 0.0)
        if set(self.statuses) == {"cut"} and "cut" not in case.expected:
            self.unexpected.append("nobody was answered")

    async def send_all_cases(self, rate: float, source: random.Random) -> None:
        """`rate` requests a second, whether or not answers come, until stdin ends. Cases that need
        a key without limits are left out."""
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin, ended.set)  # nothing is ever said there
        cases = [case for case in CASES if not case.unlimited]
        tasks: set[asyncio.Task[bool]] = set()
        while not ended.is_set():
            case = source.choice(cases)
            content = source.choice(self.requests(case))
            tasks.add(asyncio.create_task(asyncio.wait_for(self.send(case, content), PATIENCE)))
            try:
                await asyncio.wait_for(ended.wait(), source.expovariate(rate))
            except TimeoutError:
                continue
        await _end(tasks, LAST)

    def report(self) -> dict[str, Any]:
        """What a process of this client prints at its end."""
        return {
            "sent": self.statuses.total(),
            "statuses": dict(sorted(self.statuses.items())),
            "unexpected": self.unexpected,
        }

    def _count(self, case: Case, status: str, text: str) -> None:
        self.statuses[status] += 1
        self._answered.set()
        if status not in case.expected and len(self.unexpected) < EXAMPLES:
            self.unexpected.append(f"{case.name}: {status} {text}")


async def _end(tasks: Any, seconds: float) -> None:
    """Waits for them so long, cuts what is under way, and raises what one has raised."""
    if not tasks:
        return
    _done, running = await asyncio.wait(tasks, timeout=seconds)
    for task in running:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, TimeoutError):
            raise result


def _keyed(content: bytes, key: str) -> bytes:
    first, end, rest = content.partition(b"\r\n")
    if not key or not end:
        return content
    return first + end + f"Authorization: Bearer {key}\r\n".encode() + rest


def attack(url: str, case: str, seconds: float, key: str) -> None:
    """A helper that sends one case. Prints when it begins (monotonic seconds), with its requests
    built, and at the end what it did, with the share of a core that it took."""
    client, chosen = HostileClient(url, key), next(one for one in CASES if one.name == case)
    client.requests(chosen)
    began, cpu = time.monotonic(), time.process_time()
    print(began, flush=True)
    uvloop.run(client.send_one_case(chosen, seconds))
    share = (time.process_time() - cpu) / (time.monotonic() - began)
    print(json.dumps(client.report() | {"cpu": round(share, 3)}), flush=True)


def pester(url: str, rate: float, seed: int) -> None:
    """A helper that sends a few requests of all cases until its stdin ends."""
    client = HostileClient(url)
    uvloop.run(client.send_all_cases(rate, random.Random(seed)))
    print(json.dumps(client.report()), flush=True)


# ----------------------------------------------------------------------------------- the command

MAX_LONGER_GAP = 0.5  # seconds, than in calm
STARTING = 60.0  # seconds for a case's requests to be built
ENGINE = {"threads": 1, "log_level": "info"}


@dataclass(frozen=True)
class CaseResult:
    """What a case did.

    Attributes:
    - gap, first: the streams' longest, in seconds
    - cpu: the hostile client's share of a core
    - tracebacks: new ones in the server's log
    """

    case: str
    sent: int
    statuses: dict[str, int]
    gap: float
    first: float
    pieces: int
    cpu: float
    restarts: int
    tracebacks: int
    broken: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case")
    parser.add_argument("--calm", type=float, default=10.0, help="seconds without any of them")
    parser.add_argument("--streams", type=int, default=8)
    said = "requests that the hostile client's key may have at a time"
    parser.add_argument("--concurrent", type=int, default=16, help=said)
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument("--list", action="store_true", help="names the cases, and does nothing")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints a table while it goes on."""
    cases = [case for case in CASES if options.only in case.name]
    if options.list:
        print("\n".join(case.name for case in cases))
        return {"broken": []}
    with _keys(options.concurrent) as (file, good, bad), ExitStack() as stack:  # good: no limits
        server = stack.enter_context(ServerUnderTest({**ENGINE, "api_key_file": file, **settings}))
        streams = stack.enter_context(Streams(server.url, options.streams, good))
        streams.settle()
        began = time.monotonic()
        time.sleep(options.calm)
        calm = streams.seen.between(began, time.monotonic())
        _show("calm", calm, calm.pieces / (time.monotonic() - began))
        found = []
        for case in cases:
            key = good if case.unlimited else bad
            found.append(_run_case(case, server, streams, (options.seconds, key), calm))
            if server.process.poll() is not None:
                break
    return {
        "calm": asdict(calm),
        "cases": [asdict(one) for one in found],
        "longest_gap": max((one.gap for one in found), default=0.0),
        "longest_first": max((one.first for one in found), default=0.0),
        "broken": [f"{one.case}: {what}" for one in found for what in one.broken],
    }


@contextmanager
def _keys(concurrent: int) -> Iterator[tuple[str, str, str]]:
    """(a file of two keys, the key of the eight, the key of the hostile client)."""
    good, good_line = new_key("good")
    bad, bad_line = new_key("bad")
    with tempfile.TemporaryDirectory(prefix="pipeinfer-chaos-") as folder:
        file = Path(folder, "keys.txt")
        file.write_text(f"{good_line}\n{bad_line} concurrent={concurrent}\n")
        yield str(file), good, bad


def _run_case(
    case: Case, server: ServerUnderTest, streams: Streams, how: tuple[float, str], calm: StreamTimes
) -> CaseResult:
    """Sends a case for so many seconds with a key, and looks at everybody else."""
    pids, tracebacks = server.pids(), server.tracebacks()
    seconds, key = how
    options = {"url": server.url, "case": case.name, "seconds": seconds, "key": key}
    with Helper("chaos.hostile:attack", **options) as helper:
        began, did = helper.finish(STARTING + 2 * seconds + FIRST)
    settled = streams.settle()
    ended = time.monotonic()
    during = streams.seen.between(began, ended)
    try:
        now = server.pids()
    except OSError:
        now = {}
    restarts = sum(now.get(stage) != pid for stage, pid in pids.items())
    broken = [f"unexpected answer: {text}" for text in did["unexpected"]]
    broken += [f"a stream failed: {text}" for text in during.failed[:3]]
    if not settled:
        broken.append("a stream never went on")
    if during.gap > calm.gap + MAX_LONGER_GAP:
        broken.append(f"a gap of {during.gap:.2f} s; in calm it is {calm.gap:.2f} s")
    if during.first > calm.first + MAX_LONGER_GAP and not case.unlimited:
        broken.append(f"a first token after {during.first:.2f} s; in calm {calm.first:.2f} s")
    if restarts:
        broken.append(f"{restarts} processes are others now")
    _show(case.name, during, during.pieces / (ended - began), did, broken)
    return CaseResult(
        case.name, did["sent"], did["statuses"], during.gap, during.first, during.pieces,
        did["cpu"], restarts, server.tracebacks() - tracebacks, broken,
    )  # fmt: skip


def _show(
    name: str,
    times: StreamTimes,
    rate: float,
    did: Mapping[str, Any] | None = None,
    broken: Sequence[str] = (),
) -> None:
    did = did or {"cpu": 0.0, "statuses": {}}
    statuses = " ".join(f"{status}:{count}" for status, count in did["statuses"].items())
    print(
        f"{name:34} gap {times.gap:6.3f} first {times.first:6.3f} {rate:6.0f}/s "
        f"cpu {did['cpu']:4.0%}  {statuses[:60]:60} {'; '.join(broken)[:300]}",
        file=sys.stderr,
        flush=True,
    )

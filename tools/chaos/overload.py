"""`overload`: many more requests a second than can be served, for a while.

Broken: an accepted request that does not end well, any status but 200 and 429, a 429 later than
200 ms (p99), a gateway of more than 1 GiB, /health that is not answered. /health and the gateway's
memory are sampled ten times a second by this process, the requests come from another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import uvloop

from harness import raw_http
from harness.processes import Helper
from harness.server import ServerUnderTest
from pipeinfer.bench.client import distribution

PATIENCE = 300.0  # seconds for requests that were accepted
Row = tuple[float, float, float, int, bool]  # of a request: due, sent, answered, status, good


def offer(url: str, rate: float, seconds: float, tokens: int) -> None:
    """A helper that sends chats at their time, so many a second, whether or not others came back.
    Connections are kept and used again; there are as many as requests wait. Prints the rows."""
    print(json.dumps(uvloop.run(_offer(url, rate, seconds, tokens))), flush=True)


class _Connection(asyncio.Protocol):
    """A kept connection with at most one request in flight. Cheap: no stream, no task."""

    def __init__(self, idle: list[_Connection], tokens: int) -> None:
        self._idle, self._tokens = idle, tokens
        self._data = bytearray()
        self._answered: asyncio.Future[tuple[float, int, bool]] | None = None

    def connection_made(self, transport: Any) -> None:  # uvloop's is none of asyncio's
        self._transport = transport

    def send(self, content: bytes) -> asyncio.Future[tuple[float, int, bool]]:
        """The future gets (when it was answered, status, whether that was a good answer)."""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        return self._answered

    def data_received(self, data: bytes) -> None:
        self._data += data
        begin = self._data.find(b"\r\n\r\n") + 4
        if begin < 4:
            return
        head = bytes(self._data[:begin]).lower()
        _, _, length = head.partition(b"content-length:")
        end = begin + int(length.split(b"\r\n", 1)[0])
        if len(self._data) < end or self._answered is None:
            return
        status, body = int(head[9:12]), bytes(self._data[begin:end])
        good = self._good(status, body)
        self._data.clear()
        self._idle.append(self)
        answered, self._answered = self._answered, None
        answered.set_result((time.monotonic(), status, good))

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._answered is not None:
            self._answered.set_result((time.monotonic(), 0, False))

    def _good(self, status: int, body: bytes) -> bool:
        """Whole if it was accepted; with OpenAI's error if not."""
        content = json.loads(body)
        if status == 200:
            whole = content["usage"]["completion_tokens"] == self._tokens
            return whole and content["choices"][0]["finish_reason"] == "length"
        return bool(content["error"]["message"])


async def _offer(url: str, rate: float, seconds: float, tokens: int) -> list[Row]:
    address, loop = raw_http.Address.of(url), asyncio.get_running_loop()
    idle: list[_Connection] = []
    rows: list[Row] = []
    waiting: set[asyncio.Task[None]] = set()
    message = {"role": "user", "content": "Copy: abcdefgh"}
    body = {"messages": [message], "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8}
    content = raw_http.request("/v1/chat/completions", json.dumps(body).encode())

    async def one(due: float) -> None:
        try:
            if idle:
                connection = idle.pop()
            else:
                _, connection = await loop.create_connection(
                    lambda: _Connection(idle, tokens), address.host, address.port
                )
            sent = time.monotonic()
            rows.append((due, sent, *await connection.send(content)))
        except OSError:
            rows.append((due, due, time.monotonic(), 0, False))

    began = time.monotonic()
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if due > time.monotonic():
            await asyncio.sleep(due - time.monotonic())
        task = loop.create_task(one(due))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    if waiting:
        await asyncio.wait(waiting, timeout=PATIENCE)
    return rows + [(began, began, began, -1, False) for _ in waiting]


# ----------------------------------------------------------------------------------- the command

SERVER = {"threads": 1, "max_running": 64, "max_queue": 64, "log_level": "warning"}
EVERY = 0.1  # seconds between samples
SILENT = 5.0  # seconds after which /health counts as not answered
MAX_REFUSAL_SECONDS = 0.2  # of a 429, p99
MAX_GATEWAY_BYTES = 2**30


@dataclass
class Samples:
    """Of a server under load.

    Attributes:
    - health: seconds of each answer of /health
    - statuses: of those answers
    - unanswered: requests for /health without an answer
    - rss: most bytes of the gateway
    """

    health: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    rss: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics."""
    offered = {"rate": options.rate, "seconds": options.seconds, "tokens": options.tokens}
    with ServerUnderTest({**SERVER, **settings}) as server:
        gateway = psutil.Process(server.pids()["gateway-0"])
        calm = gateway.memory_info().rss
        with Helper("chaos.overload:offer", url=server.url, **offered) as helper:
            rows, samples = asyncio.run(_watched(server, gateway, helper))
        pids = server.pids()
        alive = pids["gateway-0"] == gateway.pid
    metrics = judged(rows, samples, options)
    metrics["gateway_calm_mib"] = calm >> 20
    if not alive:
        metrics["broken"].append("the gateway is another process now")
    return metrics


async def _watched(
    server: ServerUnderTest, gateway: psutil.Process, helper: Helper
) -> tuple[list[Row], Samples]:
    """Samples until the helper ends."""
    samples = Samples()
    printed = asyncio.create_task(asyncio.to_thread(helper.finish))
    address = raw_http.Address.of(server.url)
    looks: set[asyncio.Task[None]] = set()
    while not printed.done():
        look = asyncio.create_task(_look(address, samples))
        looks.add(look)
        look.add_done_callback(looks.discard)
        samples.rss = max(samples.rss, gateway.memory_info().rss)
        await asyncio.sleep(EVERY)
    await asyncio.gather(*looks)
    return (await printed)[0], samples


async def _look(address: raw_http.Address, samples: Samples) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(SILENT):
            reader, writer = await raw_http.connect(address)
            writer.write(raw_http.request("/health", method="GET"))
            answer = await raw_http.answer(reader)
            writer.close()
    except (OSError, TimeoutError):
        samples.unanswered += 1
        return
    samples.health.append(time.monotonic() - began)
    samples.statuses[answer.status] += 1


def judged(rows: list[Row], samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    """The metrics, "broken" among them."""
    refused = [row for row in rows if row[3] == 429]
    accepted = [row for row in rows if row[3] == 200]
    since_sent = distribution([row[2] - row[1] for row in refused])
    broken = []
    if any(not row[4] for row in rows):
        broken.append(f"{sum(not row[4] for row in rows)} answers were not whole")
    statuses = Counter(row[3] for row in rows)
    if set(statuses) - {200, 429} or not accepted or not refused:
        broken.append(f"statuses {dict(statuses)}")
    if since_sent.get("p99", 0.0) > MAX_REFUSAL_SECONDS * 1e3:
        broken.append(f"a 429 takes {since_sent['p99']:.0f} ms (p99)")
    if samples.rss > MAX_GATEWAY_BYTES:
        broken.append(f"the gateway takes {samples.rss >> 20} MiB")
    if samples.unanswered or set(samples.statuses) != {200}:
        broken.append(f"/health: {samples.unanswered} silent, {dict(samples.statuses)}")
    return {
        "offered": len(rows),
        "offered_per_s": round(len(rows) / options.seconds, 1),
        "statuses": {str(status): count for status, count in statuses.items()},
        "refused_ms": since_sent,
        "refused_since_due_ms": distribution([row[2] - row[0] for row in refused]),
        "slow_seconds": _slow(refused),
        "accepted_s": distribution([(row[2] - row[1]) / 1e3 for row in accepted]),
        "late_ms": distribution([row[1] - row[0] for row in rows if row[3] != -1]),
        "health_ms": distribution(samples.health),
        "health_samples": len(samples.health) + samples.unanswered,
        "gateway_mib": samples.rss >> 20,
        "broken": broken,
    }


def _slow(refused: list[Row]) -> dict[str, int]:
    """How many were refused late, by the second in which they were sent."""
    first = min((row[1] for row in refused), default=0.0)
    late = Counter(
        int(row[1] - first) for row in refused if row[2] - row[1] > MAX_REFUSAL_SECONDS / 2
    )
    return {str(second): count for second, count in sorted(late.items())}

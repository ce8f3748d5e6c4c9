"""Clients that stream one answer after another, in a process of their own, and when pieces came.

Times are those of the machine's monotonic clock, which is the same for every process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from dataclasses import dataclass

import uvloop

from harness import raw_http
from harness.processes import Helper
from pipeinfer.demo import copy_task

SHORT, LONG = 80, 600  # tokens of an answer: some begin all the time, some go on for long
OFTEN = 0.05  # seconds between lines
BREATH = 0.2  # seconds after an answer that was none

Event = tuple[int, str, float]  # client, "ask", "piece", "end" or "fail: ...", time


def stream(url: str, clients: int, key: str) -> None:
    """A helper with so many clients, until it is killed. Prints lists of events."""
    uvloop.run(_stream_all(raw_http.Address.of(url), clients, key))


async def _stream_all(address: raw_http.Address, clients: int, key: str) -> None:
    events: list[Event] = []
    tasks = [asyncio.create_task(_client(n, address, key, events)) for n in range(clients)]
    while not any(task.done() for task in tasks):
        await asyncio.sleep(OFTEN)
        if events:
            said, events[:] = json.dumps(events), []
            print(said, flush=True)
    await asyncio.gather(*tasks)  # raises what ended one of them


async def _client(number: int, address: raw_http.Address, key: str, events: list[Event]) -> None:
    source = random.Random(number)
    for nth in itertools.count():
        body = {
            "messages": [{"role": "user", "content": copy_task(source, 20)[0]}],
            "seed": number,
            "temperature": 0.8,
            "max_tokens": LONG if (number + nth) % 2 else SHORT,
            "stream": True,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token moves the stream
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = raw_http.request("/v1/chat/completions", json.dumps(body).encode(), headers)
        events.append((number, "ask", time.monotonic()))
        try:
            await _answer(number, address, content, events)
        except (OSError, asyncio.IncompleteReadError, raw_http.Failed) as error:
            events.append((number, f"fail: {error!r}", time.monotonic()))
            await asyncio.sleep(BREATH)
        else:
            events.append((number, "end", time.monotonic()))


async def _answer(
    number: int, address: raw_http.Address, content: bytes, events: list[Event]
) -> None:
    """One answer; raw_http.Failed for anything but a stream that ends well."""
    reader, writer = await raw_http.connect(address)
    try:
        writer.write(content)
        status, _ = await raw_http.head(reader)
        last = b""
        if status == 200:
            async for chunk in raw_http.chunks(reader):
                last = chunk
                events.append((number, "piece", time.monotonic()))
        if status != 200 or not last.endswith(b"data: [DONE]\n\n") or b'"error"' in last:
            raise raw_http.Failed(f"status {status}, at last {last[-200:]!r}")
    finally:
        writer.close()


PATIENCE = 180.0  # seconds until every stream moves again
QUIET = 1.0  # seconds without a long gap, after which nothing lingers
MAX_QUIET_GAP = 0.4  # seconds
RECENT = 200  # events of a client


@dataclass(frozen=True)
class StreamTimes:
    """What all clients saw in a time.

    Attributes:
    - gap: seconds, the longest between two pieces of a stream
    - first: seconds, the longest from a question to the first piece
    - pieces: how many came
    - failed: what ended answers that failed
    """

    gap: float
    first: float
    pieces: int
    failed: tuple[str, ...]


class StreamEvents:
    """Events of clients, each in the order of time."""

    def __init__(self, clients: int) -> None:
        self._events: list[list[tuple[str, float]]] = [[] for _ in range(clients)]

    def add(self, client: int, kind: str, at: float) -> None:
        """One event: "ask", "piece", "end" or "fail: ...", in monotonic seconds."""
        self._events[client].append((kind, at))

    def between(self, since: float, until: float) -> StreamTimes:
        """What touches that time."""
        gap = first = 0.0
        pieces, failed = 0, []
        for events in self._events:
            before = ("", 0.0)
            for event in list(events):
                kind, at = event
                if at > since and before[1] < until:
                    if kind == "piece" and before[0] == "piece":
                        gap = max(gap, at - before[1])
                    elif kind == "piece" and before[0] == "ask":
                        first = max(first, at - before[1])
                    elif kind.startswith("fail"):
                        failed.append(kind)
                    pieces += kind == "piece"
                before = event
        return StreamTimes(round(gap, 3), round(first, 3), pieces, tuple(failed))

    def quiet(self, since: float, until: float) -> bool:
        """Whether each stream moved in that time, and none waited for long."""
        times = self.between(since, until)
        moved = all(
            any(kind == "piece" and since < at <= until for kind, at in events[-RECENT:])
            for events in self._events
        )
        return moved and max(times.gap, times.first) < MAX_QUIET_GAP and not times.failed


class Streams:
    """Clients in a process of their own, as a context manager. seen: their events so far."""

    def __init__(self, url: str, clients: int = 8, key: str = "") -> None:
        self._helper = Helper("chaos.streams:stream", url=url, clients=clients, key=key)
        self.seen = StreamEvents(clients)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.process.kill()
        self._reader.join()
        self._helper.process.wait()

    def settle(self) -> bool:
        """Waits until each stream has moved for a while without a long gap; False if that never
        comes. What was sent before is over then, in every stage."""
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE:
            time.sleep(QUIET)
            now = time.monotonic()
            if self._helper.process.poll() is not None:
                raise RuntimeError(f"the streams ended: {self._helper.process.returncode}")
            if self.seen.quiet(now - QUIET, now):
                return True
        return False

    def _read(self) -> None:
        for events in self._helper.values():
            for event in events:
                self.seen.add(*event)

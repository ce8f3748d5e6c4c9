"""Clients that stream answers under attack, and what they saw: texts, gaps, failures.

StreamClient asks one question again and again; Streams reads the clients of watch.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 20},
    {"temperature": 0.9, "min_p": 0.05, "top_k": 50},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.0, "ignore_eos": False, "min_tokens": 60},
    {"temperature": 0.8, "stop": ["zz", "7 8"]},
)


class Broken(AssertionError):
    """A promise to a client that was not kept."""


@dataclass
class StreamClient:
    """`texts`: each with the reason of its end; `moved`: when pieces of its answers came."""

    number: int
    question: str
    tokens: int
    texts: list[tuple[str, str]] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)

    async def ask(self, api: aiohttp.ClientSession) -> None:
        """One answer. Raises Broken for anything but a stream that ends well."""
        body = {
            "messages": [{"role": "user", "content": self.question}],
            "seed": self.number,
            "max_tokens": self.tokens,
            "stream": True,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token moves the stream
            **SAMPLING[self.number % len(SAMPLING)],
        }
        text, finish = "", None
        async with api.post("/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise Broken(f"client {self.number} got {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    data = json.loads(line[len("data: ") :])
                    if "error" in data:
                        raise Broken(f"client {self.number}: {data}")
                    [choice] = data["choices"]
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                    self.moved.append(time.monotonic())
        self.texts.append((text, str(finish)))

    def pause(self, since: float, until: float) -> float:
        """Seconds of the longest pause between two pieces that touches this time."""
        pairs = ((a, b) for a, b in pairwise(self.moved) if b > since and a < until)
        return max((b - a for a, b in pairs), default=0.0)


TOOL = str(Path(__file__).parent)
PATIENCE = 180.0  # seconds until every stream moves again
QUIET, SHORT = 1.0, 0.4  # seconds, and the longest gap in them, after which nothing lingers
RECENT = 200  # events of a client


@dataclass(frozen=True)
class Calm:
    """Of all clients, in seconds: the longest between two pieces of a stream, the longest from a
    question to the first piece; how many pieces came; and which answers failed."""

    gap: float
    first: float
    pieces: int
    failed: tuple[str, ...]


class Told:
    """Events of clients, each in the order of time, and what they say."""

    def __init__(self, clients: int) -> None:
        self._events: list[list[tuple[str, float]]] = [[] for _ in range(clients)]

    def note(self, client: int, kind: str, at: float) -> None:
        """One event: "ask", "piece", "end" or "fail: ...", in monotonic seconds."""
        self._events[client].append((kind, at))

    def between(self, since: float, until: float) -> Calm:
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
        return Calm(round(gap, 3), round(first, 3), pieces, tuple(failed))

    def quiet(self, since: float, until: float) -> bool:
        """Whether each stream moved in that time, and none waited for long."""
        calm = self.between(since, until)
        moved = all(
            any(kind == "piece" and since < at <= until for kind, at in events[-RECENT:])
            for events in self._events
        )
        return moved and max(calm.gap, calm.first) < SHORT and not calm.failed


class Streams:
    """Eight clients in a process of their own, as a context manager. `told`: by them, so far."""

    def __init__(self, url: str, clients: int = 8, key: str = "") -> None:
        words = ["watch", "--url", url, "--clients", str(clients), *(["--key", key] if key else [])]
        self._process = subprocess.Popen(
            [sys.executable, TOOL, *words], stdout=subprocess.PIPE, text=True
        )
        self.told = Told(clients)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def settle(self) -> bool:
        """Waits until each stream has moved for a while without a long gap; False if that never
        comes. What was sent before is over then, in every stage."""
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE:
            time.sleep(QUIET)
            now = time.monotonic()
            if self._process.poll() is not None:
                raise RuntimeError(f"the watching clients ended: {self._process.returncode}")
            if self.told.quiet(now - QUIET, now):
                return True
        return False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            for client, kind, at in json.loads(line):
                self.told.note(client, kind, at)

"""`offer`: sends chat requests at their time, so many a second, whether or not others came back.

Runs beside a command, in a process of its own. Connections are kept and used again; there are as
many as requests wait. Prints a line of JSON: each request as [due, sent, answered, status, ok].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import uvloop

from chaos import wire

PATIENCE = 300.0  # seconds for those accepted
Row = tuple[float, float, float, int, bool]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=256)


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Prints the rows."""
    print(json.dumps(uvloop.run(_offer(options))), flush=True)
    return {}


class _Connection(asyncio.Protocol):
    """A kept connection with at most one request under way. Cheap: no stream, no task."""

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


async def _offer(options: argparse.Namespace) -> list[Row]:
    origin = wire.Origin.of(options.url)
    loop = asyncio.get_running_loop()
    idle: list[_Connection] = []
    rows: list[Row] = []
    waiting: set[asyncio.Task[None]] = set()
    content = _content(options.tokens)

    async def one(due: float) -> None:
        try:
            if idle:
                connection = idle.pop()
            else:
                _, connection = await loop.create_connection(
                    lambda: _Connection(idle, options.tokens), origin.host, origin.port
                )
            sent = time.monotonic()
            rows.append((due, sent, *await connection.send(content)))
        except OSError:
            rows.append((due, due, time.monotonic(), 0, False))

    began = time.monotonic()
    for number in range(int(options.rate * options.seconds)):
        due = began + number / options.rate
        if due > time.monotonic():
            await asyncio.sleep(due - time.monotonic())
        task = loop.create_task(one(due))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    if waiting:
        await asyncio.wait(waiting, timeout=PATIENCE)
    return rows + [(began, began, began, -1, False) for _ in waiting]


def _content(tokens: int) -> bytes:
    message = {"role": "user", "content": "Copy: abcdefgh"}
    body = {"messages": [message], "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8}
    return wire.request("/v1/chat/completions", json.dumps(body).encode())

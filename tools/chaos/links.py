"""A TCP proxy for the links between stages, in a process of its own: held, cut and slowed.

Every byte arrives once and in order as long as its connection lives. Knows no stage and no message.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress

import uvloop

CHUNK = 1 << 16


class Link:
    """Connections to (host, port) are led on to (`goal`, port)."""

    def __init__(self, host: str, goal: str, port: int) -> None:
        self._host, self._goal = host, goal
        self.port = port
        self._server: asyncio.Server | None = None
        self._lines: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._open = asyncio.Event()
        self._delay, self._rate = 0.0, float("inf")

    async def mend(self) -> None:
        """As a link should be; also its beginning. OSError if the port is taken."""
        self._delay, self._rate = 0.0, float("inf")
        self._open.set()
        if self._server is None:
            self._server = await asyncio.start_server(
                self._connected, self._host, self.port, limit=CHUNK
            )

    async def hold(self) -> None:
        """Nothing passes, and nobody is told."""
        self._open.clear()

    async def slow(self, delay: float, rate: float) -> None:
        """What comes waits for `delay` seconds, and behind every piece until the line has taken it
        at `rate` bytes a second."""
        self._delay, self._rate = delay, rate

    async def cut(self) -> None:
        """Connections are dropped, with what is on its way; new ones are refused."""
        if self._server is not None:
            self._server.close()
            self._server = None
        lines = dict(self._lines)
        for task, writers in lines.items():
            task.cancel()
            for writer in writers:
                _drop(writer)
        if lines:
            await asyncio.wait(lines)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # cut while it was accepted
            _drop(writer)
            return
        writers = [writer]
        task = asyncio.get_running_loop().create_task(self._lead(reader, writers))
        self._lines[task] = writers
        task.add_done_callback(self._lines.pop)

    async def _lead(
        self, reader: asyncio.StreamReader, writers: list[asyncio.StreamWriter]
    ) -> None:
        [writer] = writers
        try:
            back, forth = await asyncio.open_connection(self._goal, self.port, limit=CHUNK)
            writers.append(forth)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, forth))
                both.create_task(self._pass(back, writer))
        except* OSError:  # one end is gone, so the other is dropped
            for one in writers:
                _drop(one)
        finally:
            for one in writers:
                one.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._open.wait()
            writer.write(data)
            await writer.drain()
            if self._rate < float("inf"):
                await asyncio.sleep(len(data) / self._rate)
        writer.write_eof()


def _drop(writer: asyncio.StreamWriter) -> None:
    """At once, and the other end is told of a reset, not of a good end."""
    line = writer.get_extra_info("socket")
    if line is not None and line.fileno() >= 0:  # else it is gone already
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def run(listen: str, goal: str, ports: Sequence[int]) -> None:
    """A helper that leads connections from host `listen` to host `goal`, until stdin ends. Takes
    lines: ["hold" | "cut" | "mend", [port, ...]] or ["slow", [port, ...], seconds, bytes a second];
    each is answered with "done"."""
    uvloop.run(_run(listen, goal, ports))


async def _run(host: str, goal: str, ports: Sequence[int]) -> None:
    links = {port: Link(host, goal, port) for port in ports}
    for link in links.values():
        await link.mend()
    print('"up"', flush=True)
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    with suppress(asyncio.CancelledError):
        while line := await orders.readline():
            verb, which, *numbers = json.loads(line)
            for port in which:
                await getattr(links[port], verb)(*numbers)
            print('"done"', flush=True)
    for link in links.values():
        await link.cut()

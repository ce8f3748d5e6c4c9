"""Streams of a real server while somebody strikes it: every text is compared with its calm one.

Knows clients, their pauses, and what a server may not leave behind; nothing of what a blow does.
The gateway's connections must live: whoever kills the gateway is not to be judged here.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from chaos.serving import Serving, leftovers
from chaos.streams import Broken, StreamClient
from pipeinfer.demo.tasks import copy_task
from pipeinfer.runtime.servers import running_servers

PATIENCE = 240.0  # seconds for one answer, blows included
STUCK = 90.0  # seconds after a blow until every stream moves again
LOOK = 0.02  # seconds between looks at the streams
BREATH = 0.2  # seconds after an answer that was none
MOST_BROKEN = 20  # promises; then it is over


@dataclass(frozen=True)
class Blow:
    """`strike` returns when the server says that it is well again, or raises Broken. `kind`: under
    which its pauses are reported. wait: seconds before it, so that it falls anywhere between steps.
    """

    kind: str
    what: str
    wait: float
    strike: Callable[[], None]


Plan = Callable[[Serving], Sequence[Blow]]


def summary(pauses: Sequence[float]) -> dict[str, Any]:
    """Of the longest pauses of any stream, a blow each, in seconds."""
    return {
        "count": len(pauses), "p50": round(statistics.median(pauses), 2), "max": max(pauses),
        "all": list(pauses),
    }  # fmt: skip


class Ordeal:
    """`streams` clients under blows. pauses: seconds, for each kind of blow. broken: promises that
    did not hold. limit: seconds of blows, after which no more are struck."""

    def __init__(
        self, streams: int, tokens: int, source: random.Random, limit: float = float("inf")
    ) -> None:
        self._questions = [copy_task(source, source.randint(10, 40))[0] for _ in range(streams)]
        self._tokens, self._limit = tokens, limit
        self._expected: list[tuple[str, str]] = []
        self._during = "before the first blow"
        self.pauses: dict[str, list[float]] = {}
        self.broken: list[str] = []
        self.answers = 0

    def serve(self, server: Serving, plan: Plan, over: Callable[[], None] = lambda: None) -> None:
        """Asks in calm, strikes, compares, and looks for what is left. `plan` says, of the server
        that runs, what to do to it; `over` is told when that is done."""
        try:
            self._serve(server, plan, over)
        except (Broken, TimeoutError, aiohttp.ClientError) as error:
            self._break(f"{type(error).__name__}: {error}")

    def _serve(self, server: Serving, plan: Plan, over: Callable[[], None]) -> None:
        with server:
            pid = server.process.pid
            folder = next(s.file.parent for s in running_servers() if s.pid == pid)
            calm = asyncio.run(self._everybody(server, ()))
            if self.broken:
                return
            self._expected = [client.texts[0] for client in calm]
            self._during = "after the last blow"
            asyncio.run(self._everybody(server, plan(server)))
            over()
            left = leftovers(pid)
            if left:
                self._break(f"left behind: {left}")
            family = psutil.Process(pid).children(recursive=True)
            code = server.stop()
        alive = [process.pid for process in family if process.is_running()]
        sockets = str(folder) in Path("/proc/net/unix").read_text()
        if code or alive or folder.exists() or sockets:
            self._break(
                f"the server ended with code {code}; processes {alive}, its folder "
                f"({folder.exists()}) and its sockets ({sockets}) are left"
            )

    def _break(self, what: str) -> None:
        self.broken.append(what)
        print(f"broken: {what}", file=sys.stderr, flush=True)

    async def _everybody(self, server: Serving, blows: Sequence[Blow]) -> list[StreamClient]:
        """One answer of each client in calm, without blows; with them as many as they take."""
        clients = [StreamClient(n, q, self._tokens) for n, q in enumerate(self._questions)]
        over = asyncio.Event()
        patience = aiohttp.ClientTimeout(total=PATIENCE)
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            server.url, timeout=patience, connector=connections
        ) as api:

            async def loop(client: StreamClient) -> None:
                await self._ask(client, api)
                while not over.is_set():
                    await self._ask(client, api)

            tasks = [asyncio.create_task(loop(client)) for client in clients]
            try:
                if blows:
                    await self._strike(blows, clients)
            except BaseException:
                for task in tasks:
                    task.cancel()
                raise
            over.set()
            await asyncio.gather(*tasks)
        return clients

    async def _ask(self, client: StreamClient, api: aiohttp.ClientSession) -> None:
        """One answer, compared with that in calm."""
        began = self._during
        try:
            await client.ask(api)
        except (Broken, TimeoutError, aiohttp.ClientError) as error:
            when = began if began == self._during else f"{began} ... {self._during}"
            self._break(f"{type(error).__name__}: {error} ({when})")
            await asyncio.sleep(BREATH)
            return
        if not self._expected:
            return
        self.answers += 1
        text, expected = client.texts[-1], self._expected[client.number]
        if text != expected:
            self._break(f"client {client.number}: {text}, not {expected} ({began})")

    async def _strike(self, blows: Sequence[Blow], clients: list[StreamClient]) -> None:
        """All of them in turn, each when every stream has moved since the one before."""
        began = time.monotonic()
        await self._all_moved(began, clients)
        for number, blow in enumerate(blows):
            if len(self.broken) >= MOST_BROKEN or time.monotonic() - began > self._limit:
                return
            await asyncio.sleep(blow.wait)
            self._during = f"{number + 1}/{len(blows)} {blow.kind} {blow.what}"
            struck = time.monotonic()
            try:
                await asyncio.to_thread(blow.strike)
            except Broken as error:
                self._break(f"{error} ({self._during})")
            ready = time.monotonic()
            await self._all_moved(ready, clients)
            pause = round(max(client.pause(struck, ready) for client in clients), 2)
            self.pauses.setdefault(blow.kind, []).append(pause)
            said = f"{time.strftime('%H:%M:%S')} {self._during}: {pause:.2f} s"
            print(said, file=sys.stderr, flush=True)

    async def _all_moved(self, since: float, clients: list[StreamClient]) -> None:
        """Waits until each stream has moved. Raises Broken, which names those that do not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK):
                while not all(c.moved and c.moved[-1] > since for c in clients):
                    await asyncio.sleep(LOOK)
            return
        still = [c.number for c in clients if not c.moved or c.moved[-1] <= since]
        raise Broken(f"{len(still)} streams stand still since {STUCK:g} s ({self._during})")

"""`kills`: stages of a real server are killed one after another under streams; texts are compared.

The gateway is spared, for it holds the connections. A text that differs from the undisturbed one,
or anything left behind, is an error. For each kind of victim: the longest pause of any stream
after each kill, in seconds. Each round kills one stage of each kind, in a drawn order.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from chaos.leftovers import leftovers
from chaos.serving import Place, Serving
from chaos.stream_client import Broken, StreamClient
from pipeinfer.demo.tasks import copy_task
from pipeinfer.runtime.find import running_servers

PATIENCE = 240.0  # seconds for one answer, kills included
POOL = {"kv_pages": 600, "threads": 1}  # too small for 64 streams at once: some are preempted
LOOK = 0.02  # seconds between looks at the streams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=120, help="of each answer, at most")
    parser.add_argument("--storm-seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kill stages of this kind alone")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; what was broken is named, by the first that was noticed."""
    storm = Storm(options.streams, options.tokens, options.storm_seed)
    broken: list[str] = []
    began = time.monotonic()
    try:
        storm.serve({**POOL, **settings}, options.kills, options.only)
    except (Broken, TimeoutError, aiohttp.ClientError) as error:
        broken.append(f"{type(error).__name__}: {error}")
    return {
        "kills": sum(map(len, storm.pauses.values())),
        "streams": options.streams,
        "answers": storm.answers,
        "seconds": round(time.monotonic() - began, 1),
        "pauses": {kind: _summary(pauses) for kind, pauses in sorted(storm.pauses.items())},
        "broken": broken,
    }


def _summary(pauses: list[float]) -> dict[str, Any]:
    return {"p50": round(statistics.median(pauses), 2), "max": max(pauses), "all": pauses}


def drawn(places: list[Place], kills: int, source: random.Random) -> list[Place]:
    """Victims: of every kind as many, one of each kind a round, in a drawn order."""
    kinds = sorted({name for name, _, _ in places})
    victims: list[Place] = []
    while len(victims) < kills:
        for kind in source.sample(kinds, len(kinds)):
            victims.append(source.choice([place for place in places if place[0] == kind]))
    return victims[:kills]


def kill(server: Serving, victim: Place) -> None:
    """-9; returns when another process is in its place and the server is well."""
    before = server.pids()[victim]
    os.kill(before, signal.SIGKILL)

    def back() -> bool:
        health = server.health()
        stages = health["stages"]
        now = {(s["name"], s["group"], s["rank"]): s["pid"] for s in stages}
        return now.get(victim) not in (None, before) and health["status"] == "ready"

    server.wait(back, f"{victim} came back")


class Storm:
    """Kills under `streams` clients. `pauses`: seconds, for each kind of victim."""

    def __init__(self, streams: int, tokens: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._questions = [
            copy_task(self._random, self._random.randint(10, 40))[0] for _ in range(streams)
        ]
        self._tokens = tokens
        self.pauses: dict[str, list[float]] = {}
        self.answers = 0

    def serve(self, settings: Mapping[str, Any], kills: int, only: str) -> None:
        """Serves, kills, compares, and looks for what is left. Raises Broken or TimeoutError."""
        with Serving(settings) as server:
            pid = server.process.pid
            folder = next(s.file.parent for s in running_servers() if s.pid == pid)
            self._compare(server, kills, only)
            left = leftovers(pid)
            if left:
                raise Broken(f"left behind: {left}")
            family = psutil.Process(pid).children(recursive=True)
            code = server.stop()
        alive = [process.pid for process in family if process.is_running()]
        sockets = str(folder) in Path("/proc/net/unix").read_text()
        if code or alive or folder.exists() or sockets:
            raise Broken(
                f"the server ended with code {code}; processes {alive}, its folder "
                f"({folder.exists()}) and its sockets ({sockets}) are left"
            )

    def _compare(self, server: Serving, kills: int, only: str) -> None:
        undisturbed = asyncio.run(self._everybody(server, []))
        expected = [client.texts[0] for client in undisturbed]
        places = sorted(
            place for place in server.pids() if place[0] != "gateway" and only in place[0]
        )
        disturbed = asyncio.run(self._everybody(server, drawn(places, kills, self._random)))
        self.answers = sum(len(client.texts) for client in disturbed)
        for client in disturbed:
            for text in client.texts:
                if text != expected[client.number]:
                    raise Broken(f"client {client.number}: {text}, not {expected[client.number]}")
        if sum(map(len, self.pauses.values())) != kills:
            raise Broken(f"not all of {kills} kills hit streams under way: {self.pauses}")

    async def _everybody(self, server: Serving, victims: list[Place]) -> list[StreamClient]:
        clients = [StreamClient(n, q, self._tokens) for n, q in enumerate(self._questions)]
        over = asyncio.Event()
        patience = aiohttp.ClientTimeout(total=PATIENCE)
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            server.url, timeout=patience, connector=connections
        ) as api:

            async def loop(client: StreamClient) -> None:
                await client.ask(api)
                while not over.is_set():
                    await client.ask(api)

            tasks = [asyncio.create_task(loop(client)) for client in clients]
            try:
                await self._kills(server, victims, clients, tasks)
            finally:
                over.set()
            await asyncio.gather(*tasks)
        return clients

    async def _kills(
        self,
        server: Serving,
        victims: list[Place],
        clients: list[StreamClient],
        tasks: list[asyncio.Task[None]],
    ) -> None:
        async def all_moved(since: float) -> bool:
            """Waits; False if a client failed: gather says how."""
            while not all(c.moved and c.moved[-1] > since for c in clients):
                if any(task.done() for task in tasks):
                    return False
                await asyncio.sleep(LOOK)
            return True

        if not victims or not await all_moved(time.monotonic()):
            return
        for number, victim in enumerate(victims):
            await asyncio.sleep(self._random.random())  # anywhere between steps
            killed = time.monotonic()
            await asyncio.to_thread(kill, server, victim)
            ready = time.monotonic()
            if not await all_moved(ready):
                return
            kind = f"rank {victim[2]}" if victim[0] == "engine" else victim[0]
            pause = max(c.pause(killed, ready) for c in clients)
            self.pauses.setdefault(kind, []).append(round(pause, 2))
            said = (
                f"{time.strftime('%H:%M:%S')} {number + 1}/{len(victims)} {victim}: {pause:.2f} s"
            )
            print(said, file=sys.stderr, flush=True)

"""`power`: all processes of a server with `--store` are killed at once, again and again.

What a client has seen completed must be there when the next server runs: the response as it was,
and the conversation that goes on from it. What a client has seen deleted must not be. The file must
pass SQLite's own check after each cut.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from chaos.harms import Broken
from harness.server import ServerUnderTest

CLIENTS = 8
LOOKED_AT = 40  # responses of earlier rounds that are looked at in a round
MAX_SECONDS = 4.0  # of a round, before all is killed
MIN_COMPLETED = 4  # responses of a round, however long they take
MODES = ("plain", "stream", "background")
PATIENCE = 120.0  # seconds for one answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--storm-seed", type=int, default=0)


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, and what was broken."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pipeinfer-chaos-") as folder:
        path = str(Path(folder, "responses.db"))
        power = PowerCuts(path, random.Random(options.storm_seed), settings)
        for number in range(options.cuts):
            power.round(f"{number + 1}/{options.cuts}")
        power.last_round()
    return {
        "cuts": options.cuts,
        "completed": len(power.completed),
        "deleted": len(power.deleted),
        "looked_at": power.looked_at,
        "continued": power.continued,
        "seconds": round(time.monotonic() - began, 1),
        "broken": power.broken,
    }


class PowerCuts:
    """Lives of servers with one store.

    Attributes:
    - completed: the output of each response that a client has seen completed
    - deleted: ids that a client has seen deleted
    - looked_at, continued: responses that were found again, and conversations that went on
    - broken: promises that did not hold
    """

    def __init__(self, path: str, source: random.Random, settings: Mapping[str, Any]) -> None:
        self._path, self._random = path, source
        self._settings = {"kv_pages": 600, "threads": 1, **settings, "store": path}
        self.completed: dict[str, str] = {}
        self.deleted: set[str] = set()
        self.looked_at = self.continued = 0
        self.broken: list[str] = []

    def round(self, name: str) -> None:
        """A server runs, its store is looked at, clients ask, and all is killed."""
        seconds = self._random.uniform(0.5, MAX_SECONDS)
        with ServerUnderTest(self._settings) as server:
            try:
                asyncio.run(self._live(server, seconds))
            except (Broken, aiohttp.ClientError, TimeoutError) as error:
                self._break(f"{name}: {type(error).__name__}: {error}")
            kill_all(server)
        with sqlite3.connect(self._path) as connection:
            [(said,)] = connection.execute("PRAGMA integrity_check").fetchall()
        connection.close()
        if said != "ok":
            self._break(f"{name}: the store is broken: {said}")
        print(f"{name}: {len(self.completed)} completed", file=sys.stderr, flush=True)

    def last_round(self) -> None:
        """A server runs, and all that was completed is looked at."""
        with ServerUnderTest(self._settings) as server:
            asyncio.run(self._look(server, len(self.completed)))

    def _break(self, what: str) -> None:
        self.broken.append(what)
        print(f"broken: {what}", file=sys.stderr, flush=True)

    async def _live(self, server: ServerUnderTest, seconds: float) -> None:
        await self._look(server, LOOKED_AT)
        async with _session(server) as http:
            least = len(self.completed) + MIN_COMPLETED
            clients = [asyncio.create_task(self._client(http)) for _ in range(CLIENTS)]
            await asyncio.sleep(seconds)
            async with asyncio.timeout(PATIENCE):
                while len(self.completed) < least:
                    await asyncio.sleep(0.02)
            kill_all(server)
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _look(self, server: ServerUnderTest, most: int) -> None:
        names = self._random.sample(sorted(self.completed), min(most, len(self.completed)))
        async with _session(server) as http:
            for name in names:
                async with http.get(f"/v1/responses/{name}") as answer:
                    found = await answer.json()
                    if answer.status != 200 or _output(found) != self.completed[name]:
                        self._break(f"{name} is not what it was: {answer.status} {found}")
                self.looked_at += 1
            for name in self._random.sample(sorted(self.deleted), min(most, len(self.deleted))):
                async with http.get(f"/v1/responses/{name}") as answer:
                    if answer.status != 404:
                        self._break(f"{name} was deleted, and is there")
            for name in names[:3]:
                body = {"input": "And?", "previous_response_id": name, "max_output_tokens": 5}
                async with http.post("/v1/responses", json=body) as answer:
                    said = await answer.text()
                    broken = "previous_response_not_found" in said and self.deleted
                    if answer.status != 200 and not broken:  # a turn before it may be deleted
                        self._break(f"{name} does not go on: {said}")
                    self.continued += answer.status == 200

    async def _client(self, http: aiohttp.ClientSession) -> None:
        last = ""
        while True:
            mode = self._random.choice(MODES)
            body: dict[str, Any] = {
                "input": f"Count from {self._random.randint(1, 50)}.",
                "max_output_tokens": self._random.randint(5, 60),
                **({"stream": True} if mode == "stream" else {}),
                **({"background": True} if mode == "background" else {}),
                **({"previous_response_id": last} if last and self._random.random() < 0.5 else {}),
            }
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                response = await self._asked(http, mode, body)
                last = str(response["id"])
                self.completed[last] = _output(response)
                if self._random.random() < 0.1:
                    self.completed.pop(last)  # unknown, until it is seen
                    async with http.delete(f"/v1/responses/{last}") as answer:
                        await answer.read()
                    self.deleted.add(last)
                    last = ""

    async def _asked(
        self, http: aiohttp.ClientSession, mode: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        """The response, when it has ended. Raises aiohttp.ClientError if there is none."""
        async with http.post("/v1/responses", json=body) as answer:
            if answer.status != 200:
                raise aiohttp.ClientPayloadError(await answer.text())
            if mode == "stream":
                return await _last_response(answer)
            response = await answer.json()
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            async with http.get(f"/v1/responses/{response['id']}") as answer:
                response = await answer.json()
        return response


def _session(server: ServerUnderTest) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(total=PATIENCE))


async def _last_response(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    response: dict[str, Any] = {}
    async for line in answer.content:
        if line.startswith(b"data: "):
            response = json.loads(line.removeprefix(b"data: ")).get("response", {})
    if response.get("status") not in ("completed", "incomplete"):
        raise aiohttp.ClientPayloadError("the stream broke off")
    return response


def _output(response: dict[str, Any]) -> str:
    """What is compared of a response."""
    return json.dumps([response.get("status"), response.get("output"), response.get("usage")])


def kill_all(server: ServerUnderTest) -> None:
    """-9 of every process of the server, the one first that starts others again. Twice is no
    error."""
    if server.process.poll() is not None:
        return
    family = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(server.process.pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait()
    psutil.wait_procs(family, timeout=30)

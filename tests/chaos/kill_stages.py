"""Kills stages of a real server one after another under streams, and compares every text.

`python tests/chaos/kill_stages.py --tp 2 --streams 24 --kills 24`; the gateway is spared, for it
holds the connections. Clients ask their own question again and again, with all ways of sampling; a
text that differs from the undisturbed one, or anything left behind, is an error. Prints a line of
JSON: for each kind of victim, the longest pause of any stream after each kill, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "pipeline")]

import aiohttp  # noqa: E402
import psutil  # noqa: E402
from leftovers import leftovers  # noqa: E402

from pipeinfer.demo.tasks import copy_task  # noqa: E402
from pipeinfer.runtime.find import running_servers  # noqa: E402
from servers import Server  # noqa: E402

PATIENCE = 240.0  # seconds for one answer, kills included
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


@dataclass
class Client:
    """Asks one question, again and again; `moved`: when pieces of its answers came."""

    number: int
    question: str
    tokens: int
    texts: list[tuple[str, str]] = field(default_factory=list)  # with the reason of the end
    moved: list[float] = field(default_factory=list)

    async def ask(self, api: aiohttp.ClientSession) -> None:
        body = {
            "model": "pipeinfer-demo",
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
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    data = json.loads(line[len("data: ") :])
                    assert "error" not in data, data
                    [choice] = data["choices"]
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                    self.moved.append(time.monotonic())
        self.texts.append((text, str(finish)))

    def pause(self, since: float, until: float) -> float:
        """Seconds of the longest pause between two pieces that touches this time."""
        pairs = ((a, b) for a, b in pairwise(self.moved) if b > since and a < until)
        return max((b - a for a, b in pairs), default=0.0)


def rows(server: Server) -> dict[str, tuple[str, int, int]]:
    """{pid: (name, group, rank)} of the stages that may be killed."""
    stages = server.health()["stages"]
    return {s["pid"]: (s["name"], s["group"], s["rank"]) for s in stages if s["name"] != "gateway"}


def kill(server: Server, victim: tuple[str, int, int]) -> None:
    """-9; returns when another process is in its place and the server is well."""
    before = {place: pid for pid, place in rows(server).items()}
    os.kill(before[victim], signal.SIGKILL)

    def back() -> bool:
        now = {place: pid for pid, place in rows(server).items()}
        return now.get(victim) not in (None, before[victim]) and (
            server.health()["status"] == "ready"
        )

    try:
        server.wait(back, f"{victim} came back", 120)
    except AssertionError:
        raise AssertionError(f"{victim} did not come back: {server.health()}") from None


class Storm:
    """Kills under streams. `pauses`: seconds, for each kind of victim."""

    def __init__(self, server: Server, streams: int, tokens: int, seed: int) -> None:
        self._server, self._random = server, random.Random(seed)
        self._questions = [
            copy_task(self._random, self._random.randint(10, 40))[0] for _ in range(streams)
        ]
        self._tokens = tokens
        self.pauses: dict[str, list[float]] = {}

    async def _everybody(self, victims: list[tuple[str, int, int]]) -> list[Client]:
        clients = [Client(n, q, self._tokens) for n, q in enumerate(self._questions)]
        over = asyncio.Event()
        patience = aiohttp.ClientTimeout(total=PATIENCE)
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self._server.url, timeout=patience, connector=connections
        ) as api:

            async def loop(client: Client) -> None:
                await client.ask(api)
                while not over.is_set():
                    await client.ask(api)

            tasks = [asyncio.create_task(loop(client)) for client in clients]
            try:
                await self._kills(victims, clients, tasks)
            finally:
                over.set()
            await asyncio.gather(*tasks)
        return clients

    async def _kills(self, victims, clients: list[Client], tasks: list[asyncio.Task[None]]) -> None:
        for victim in victims:
            began = time.monotonic()
            while not all(c.moved and c.moved[-1] > began for c in clients):
                if any(task.done() for task in tasks):
                    return  # a client failed; gather says how
                await asyncio.sleep(0.02)
            await asyncio.sleep(self._random.random())  # anywhere between steps
            killed = time.monotonic()
            await asyncio.to_thread(kill, self._server, victim)
            ready = time.monotonic()
            while not all(c.moved[-1] > ready for c in clients):
                if any(task.done() for task in tasks):
                    return
                await asyncio.sleep(0.02)
            kind = f"rank {victim[2]}" if victim[0] == "engine" else victim[0]
            pause = max(c.pause(killed, ready) for c in clients)
            self.pauses.setdefault(kind, []).append(round(pause, 2))
            at = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + killed))
            print(f"{at} {victim}: {pause:.2f} s", file=sys.stderr, flush=True)

    def run(self, kills: int, only: str = "") -> None:
        """AssertionError names what differs from the undisturbed texts."""
        undisturbed = asyncio.run(self._everybody([]))
        expected = [client.texts[0] for client in undisturbed]
        places = sorted(place for place in rows(self._server).values() if only in place[0])
        victims = [self._random.choice(places) for _ in range(kills)]
        disturbed = asyncio.run(self._everybody(victims))
        for client in disturbed:
            for text in client.texts:
                assert text == expected[client.number], (client.number, text, expected)
        self.answers = sum(len(client.texts) for client in disturbed)


def run(
    streams: int, kills: int, tokens: int, seed: int, only: str, *arguments: str
) -> dict[str, object]:
    """Serves, kills, compares, and looks for what is left; returns the pauses."""
    with Server("--kv-pages", "600", "--threads", "1", *arguments) as server:
        folder = next(s.file.parent for s in running_servers() if s.pid == server.process.pid)
        storm = Storm(server, streams, tokens, seed)
        storm.run(kills, only)
        assert leftovers(server) == {}
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
    left = [process for process in family if process.is_running()]
    assert not left and not folder.exists(), (left, folder)
    sockets = Path("/proc/net/unix").read_text()
    assert str(folder) not in sockets
    return {"pauses": storm.pauses, "answers": storm.answers, "kills": kills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", default="1")
    parser.add_argument("--dp", default="1")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kill stages of this name alone")
    asked = parser.parse_args()
    split = ("--tp", asked.tp, "--dp", asked.dp)
    done = run(asked.streams, asked.kills, asked.tokens, asked.seed, asked.only, *split)
    print(json.dumps(done))


if __name__ == "__main__":
    main()

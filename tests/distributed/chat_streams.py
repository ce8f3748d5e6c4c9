"""Chats that stream from a real server at the same time, for tests that disturb it meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal

import aiohttp

from pipeinfer.demo import copy_task
from servers import Server


def questions(count: int, seed: int = 5) -> list[str]:
    rng = random.Random(seed)
    return [copy_task(rng, rng.randint(10, 40))[0] for _ in range(count)]


TRIES = 5  # of what halts may undo: streams are over before anybody disturbs them


class Chats:
    """One stream for each question; `texts` is filled as chunks come."""

    def __init__(self, server: Server, asked: list[str], tokens: int) -> None:
        self._server, self._asked, self._tokens = server, asked, tokens
        self.texts = [""] * len(asked)

    def run(self, disturb=None) -> list[str]:
        """The texts; `disturb()` runs in a thread when every stream has begun."""
        return asyncio.run(self._run(disturb))

    async def _run(self, disturb) -> list[str]:
        patience = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(self._server.url, timeout=patience) as client:
            for _ in range(TRIES):
                self.texts = [""] * len(self._asked)
                tasks = [asyncio.create_task(self._ask(client, i)) for i in range(len(self._asked))]
                while not all(self.texts) and not any(task.done() for task in tasks):
                    await asyncio.sleep(0.01)
                under_way = 2 * sum(task.done() for task in tasks) < len(tasks)
                if disturb is not None and under_way:
                    await asyncio.to_thread(disturb)
                await asyncio.gather(*tasks)
                if disturb is None or under_way:
                    return self.texts
        raise AssertionError(f"{TRIES} times half of the streams were over: too few to disturb")

    async def _ask(self, client: aiohttp.ClientSession, index: int) -> None:
        body = {
            "model": "pipeinfer-demo",
            "messages": [{"role": "user", "content": self._asked[index]}],
            "temperature": 0.0 if index % 2 else 0.8,
            "seed": index,
            "max_tokens": self._tokens,
            "stream": True,
            "ignore_eos": True,
        }
        finish = None
        async with client.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                choice = json.loads(line[len("data: ") :])["choices"][0]
                self.texts[index] += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
        assert finish == "length", f"stream {index} ended with {finish}"


def engines(server: Server, group: int = 0) -> dict[int, int]:
    """Process ids of a group's ranks."""
    rows = server.health()["stages"]
    return {r["rank"]: r["pid"] for r in rows if r["name"] == "engine" and r["group"] == group}


def hurt(
    server: Server,
    rank: int,
    how: signal.Signals,
    group: int = 0,
    freeze_others: bool = False,
    before: dict[int, int] | None = None,
) -> set[str]:
    """Signals a rank, and waits until every rank of its group is another process and ready.

    Returns the reasons that /health gave meanwhile. freeze_others: they cannot end by themselves.
    before: processes of the group, where there is no time to ask for them.
    """
    before = before or engines(server, group)
    for other in (before.keys() - {rank}) if freeze_others else ():
        os.kill(before[other], signal.SIGSTOP)
    os.kill(before[rank], how)
    reasons: set[str] = set()

    def replaced() -> bool:
        health = server.health()
        reasons.update(row["reason"] for row in health["stages"])
        now = engines(server, group)
        return not set(now.values()) & set(before.values()) and health["status"] == "ready"

    server.wait(replaced, f"group {group} came back")
    return reasons

"""`session --out DIR [MODEL]`: serves a model with recording on, and sends a mixture of requests.

What it leaves in DIR is a trace of every stage. Further flags are settings of the server. Knows
HTTP; what the answers say is not its business, only that they are what such a request gets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from pipeinfer.bench.local_server import Server
from pipeinfer.replay.codes import EQUAL
from pipeinfer.replay.mixture import Mixed, mixture, twins

# Few pages, so that requests must be preempted; the largest request still fits.
DEFAULTS = {"kv_pages": 40, "page_size": 16, "threads": 1, "dtype": "float32", "device": "cpu"}
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the traces")
    parser.add_argument("--requests", type=int, default=200, metavar="N")
    parser.add_argument("--concurrency", type=int, default=24, metavar="N")
    parser.add_argument("--seed-of-requests", type=int, default=1, metavar="N")


def run(options: argparse.Namespace, overrides: Mapping[str, object]) -> int:
    """0 if every request was answered as it should be."""
    settings = {**DEFAULTS, **overrides, "record": str(options.out)}
    requests = mixture(options.requests, options.seed_of_requests)
    begun = time.monotonic()
    with Server(settings) as server:
        outcomes = asyncio.run(_all(server.url, requests, options.concurrency))
        seconds = time.monotonic() - begun
    print(f"{len(requests)} requests in {seconds:.1f} s: {dict(sorted(outcomes.items()))}")
    for path in sorted(options.out.glob("*.pitrace")):
        print(path)
    unexpected = [name for name in outcomes if name.startswith("unexpected")]
    if unexpected:
        print(f"error: {', '.join(unexpected)}", file=sys.stderr)
    return FAILED if unexpected else EQUAL


async def _all(url: str, requests: list[Mixed], concurrency: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    waiting = iter(requests)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        outcomes.update(await asyncio.gather(*(_one(client, url, twin) for twin in twins())))

        async def work() -> None:
            for request in waiting:
                outcomes[await _one(client, url, request)] += 1

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return outcomes


async def _one(client: aiohttp.ClientSession, url: str, request: Mixed) -> str:
    """How it ended, in words."""
    body = {"model": None, **request.body}
    try:
        async with client.post(url + request.path, json=body) as answer:
            if answer.status not in request.statuses:
                text = (await answer.text())[:200]
                return f"unexpected {answer.status}, not {request.statuses}: {text}"
            if answer.status != 200:
                return f"refused {answer.status}"
            if not request.body.get("stream"):
                return str((await answer.json())["choices"][0]["finish_reason"])
            return await _stream(answer, request)
    except aiohttp.ClientError as error:
        return f"unexpected {type(error).__name__}: {error}"


async def _stream(answer: aiohttp.ClientResponse, request: Mixed) -> str:
    pieces, finish = 0, "unexpected end"
    async for raw in answer.content:
        if not raw.startswith(b"data: {"):
            continue
        if request.hang_up is not None and pieces >= request.hang_up:
            answer.close()
            return "hung up"
        pieces += 1
        chunk = json.loads(raw[len(b"data: ") :])
        if "error" in chunk:
            return f"unexpected {chunk['error']['message']}"
        for choice in chunk["choices"]:
            finish = choice["finish_reason"] or finish
    return finish

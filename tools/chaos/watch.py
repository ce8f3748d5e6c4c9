"""`watch`: clients that stream one answer after another and say when each piece came.

Runs beside a command, in a process of its own. Every 50 ms it prints a line: a JSON list of
[client, event, time]; events are "ask", "piece", "end" and "fail: ...", times are those of the
machine's monotonic clock, which is the same for every process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import uvloop

from chaos import wire
from pipeinfer.demo.tasks import copy_task

SHORT, LONG = 80, 600  # tokens of an answer: some begin all the time, some go on for long
OFTEN = 0.05  # seconds between lines
BREATH = 0.2  # seconds after an answer that was none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--url", required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--key", default="", help="an API key")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Until it is killed."""
    uvloop.run(_watch(options))
    return {}


async def _watch(options: argparse.Namespace) -> None:
    events: list[tuple[int, str, float]] = []
    origin = wire.Origin.of(options.url)
    tasks = [
        asyncio.create_task(_client(number, origin, options.key, events))
        for number in range(options.clients)
    ]
    while not any(task.done() for task in tasks):
        await asyncio.sleep(OFTEN)
        if events:
            said, events[:] = json.dumps(events), []
            print(said, flush=True)
    await asyncio.gather(*tasks)  # raises what ended one of them


async def _client(
    number: int, origin: wire.Origin, key: str, events: list[tuple[int, str, float]]
) -> None:
    source = random.Random(number)
    for nth in itertools.count():
        tokens = LONG if (number + nth) % 2 else SHORT
        body = {
            "messages": [{"role": "user", "content": copy_task(source, 20)[0]}],
            "seed": number,
            "temperature": 0.8,
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token moves the stream
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = wire.request("/v1/chat/completions", json.dumps(body).encode(), headers)
        events.append((number, "ask", time.monotonic()))
        try:
            await _stream(number, origin, content, events)
        except (OSError, asyncio.IncompleteReadError, wire.Failed) as error:
            events.append((number, f"fail: {error!r}", time.monotonic()))
            await asyncio.sleep(BREATH)
        else:
            events.append((number, "end", time.monotonic()))


async def _stream(
    number: int, origin: wire.Origin, content: bytes, events: list[tuple[int, str, float]]
) -> None:
    """One answer; wire.Failed for anything but a stream that ends well."""
    reader, writer = await wire.connect(origin)
    try:
        writer.write(content)
        status, _ = await wire.head(reader)
        last = b""
        if status == 200:
            async for chunk in wire.chunks(reader):
                last = chunk
                events.append((number, "piece", time.monotonic()))
        if status != 200 or not last.endswith(b"data: [DONE]\n\n") or b'"error"' in last:
            raise wire.Failed(f"status {status}, at last {last[-200:]!r}")
    finally:
        writer.close()

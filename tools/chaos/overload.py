"""`overload`: many more requests a second than can be served, for a while.

Broken: an accepted request that does not end well, any status but 200 and 429, a 429 later than
200 ms (p99), a gateway of more than 1 GiB, /health that is not answered. /health and the gateway's
memory are sampled ten times a second by this process, the requests come from another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from chaos import wire
from chaos.offer import Row
from chaos.serving import Serving
from chaos.streams import TOOL

SERVER = {"threads": 1, "max_running": 64, "max_queue": 64, "log_level": "warning"}
EVERY = 0.1  # seconds between samples
SILENT = 5.0  # seconds after which /health counts as not answered
LATEST, MOST = 0.2, 2**30  # seconds of a 429, p99; bytes of the gateway


@dataclass
class Samples:
    """`health`: seconds of each answer of /health; `unanswered`: how many were none; `statuses` of
    the others; `rss`: most bytes of the gateway."""

    health: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    unanswered: int = 0
    rss: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics."""
    words = ["--rate", str(options.rate), "--seconds", str(options.seconds)]
    words += ["--tokens", str(options.tokens)]
    with Serving({**SERVER, **settings}) as server:
        gateway = psutil.Process(server.pids()[("gateway", 0, 0)])
        calm = gateway.memory_info().rss
        command = [sys.executable, TOOL, "offer", "--url", server.url, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as offering:
            rows, samples = asyncio.run(_watched(server, gateway, offering))
        pids = server.pids()
        alive = pids[("gateway", 0, 0)] == gateway.pid
    metrics = judged(rows, samples, options)
    metrics["gateway_calm_mib"] = calm >> 20
    if not alive:
        metrics["broken"].append("the gateway is another process now")
    return metrics


async def _watched(
    server: Serving, gateway: psutil.Process, offering: subprocess.Popen[str]
) -> tuple[list[Row], Samples]:
    """Samples until the offering ends."""
    samples = Samples()
    printed = asyncio.create_task(asyncio.to_thread(offering.communicate))
    origin = wire.Origin.of(server.url)
    looks: set[asyncio.Task[None]] = set()
    while not printed.done():
        look = asyncio.create_task(_look(origin, samples))
        looks.add(look)
        look.add_done_callback(looks.discard)
        samples.rss = max(samples.rss, gateway.memory_info().rss)
        await asyncio.sleep(EVERY)
    await asyncio.gather(*looks)
    return json.loads((await printed)[0]), samples


async def _look(origin: wire.Origin, samples: Samples) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(SILENT):
            reader, writer = await wire.connect(origin)
            writer.write(wire.request("/health", method="GET"))
            answer = await wire.answer(reader)
            writer.close()
    except (OSError, TimeoutError):
        samples.unanswered += 1
        return
    samples.health.append(time.monotonic() - began)
    samples.statuses[answer.status] += 1


def judged(rows: list[Row], samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    """The metrics, "broken" among them."""
    refused = [row for row in rows if row[3] == 429]
    accepted = [row for row in rows if row[3] == 200]
    since_sent = _milliseconds([row[2] - row[1] for row in refused])
    broken = []
    if any(not row[4] for row in rows):
        broken.append(f"{sum(not row[4] for row in rows)} answers were not whole")
    statuses = Counter(row[3] for row in rows)
    if set(statuses) - {200, 429} or not accepted or not refused:
        broken.append(f"statuses {dict(statuses)}")
    if since_sent.get("p99", 0.0) > LATEST * 1e3:
        broken.append(f"a 429 takes {since_sent['p99']:.0f} ms (p99)")
    if samples.rss > MOST:
        broken.append(f"the gateway takes {samples.rss >> 20} MiB")
    if samples.unanswered or set(samples.statuses) != {200}:
        broken.append(f"/health: {samples.unanswered} silent, {dict(samples.statuses)}")
    return {
        "offered": len(rows),
        "offered_per_s": round(len(rows) / options.seconds, 1),
        "statuses": {str(status): count for status, count in statuses.items()},
        "refused_ms": since_sent,
        "refused_since_due_ms": _milliseconds([row[2] - row[0] for row in refused]),
        "slow_seconds": _slow(refused),
        "accepted_s": _milliseconds([(row[2] - row[1]) / 1e3 for row in accepted]),
        "late_ms": _milliseconds([row[1] - row[0] for row in rows if row[3] != -1]),
        "health_ms": _milliseconds(samples.health),
        "health_samples": len(samples.health) + samples.unanswered,
        "gateway_mib": samples.rss >> 20,
        "broken": broken,
    }


def _slow(refused: list[Row]) -> dict[str, int]:
    """How many were refused late, by the second in which they were sent."""
    first = min((row[1] for row in refused), default=0.0)
    late = Counter(int(row[1] - first) for row in refused if row[2] - row[1] > LATEST / 2)
    return {str(second): count for second, count in sorted(late.items())}


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.asarray(seconds) * 1e3, (50, 99, 100)).round(2)
    return dict(zip(("p50", "p99", "max"), values.tolist(), strict=True))

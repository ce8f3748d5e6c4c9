"""`takeover`: a rank of an engine is killed (-9), or the engine swapped, under streams; what the
next one computes again, and how long streams wait.

Clients ask seeded questions again and again; each answer is compared with the first one, which
nothing disturbed. Between two kills the memory holder is killed as well: its successor knows of no
loss, so that every loss is a first one. Knows HTTP, /metrics and processes; no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench import shapes
from harness.processes import used_gpu_mib
from harness.server import ServerUnderTest, running
from pipeinfer.bench.client import Endpoint
from pipeinfer.bench.dataset import SampleRequest
from pipeinfer.core import TAKEOVER_PHASES

LOOK = 0.02  # seconds between two looks
PATIENCE = 3600.0  # seconds until all streams go on
SETTLED_SECONDS = 1.0  # after a takeover, until /metrics says no more of the standby that was
HOLDER_SECONDS = 4.0  # for the next memory holder to start, and to get what the engine keeps
VARIANTS: dict[str, dict[str, Any]] = {
    "keep": {},
    "no-keep": {"no_keep_memory": True},
    "standby": {"standby": True},
}
MAX_BROKEN = 20  # promises; then it is over
HOLDER_MODULE = "pipeinfer.runtime.memory_holder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    shapes.add_config(parser)
    add("--streams", type=int, default=64)
    add("--context", type=int, default=1000, help="tokens of each stream's prompt")
    add("--tokens", type=int, default=400, help="of each answer")
    add("--kills", type=int, default=10, help="of each variant, in each round")
    add("--rounds", type=int, default=1, help="each starts a server of each variant, in turns")
    add("--variants", default="keep", help=f"of {', '.join(VARIANTS)}")
    add("--wait", type=float, default=3.0, metavar="S", help="before a kill, at most; drawn")
    add("--calm", type=float, default=0.0, metavar="S", help="before each kill, beside --wait")
    add("--seconds", type=float, default=float("inf"), help="no kill begins later")
    add("--storm-seed", type=int, default=0)
    add("--swaps", action="store_true", help="`pipeinfer swap` of the engine in place of each kill")
    add("--any-text", action="store_true", help="other texts are counted, and break no promise")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, and what was broken."""
    with shapes.settings_of(options.config, settings) as chosen:
        highest = shapes.highest_id(chosen)
        source = random.Random(options.storm_seed)
        clients = [
            Client(number, [source.randint(0, highest) for _ in range(options.context)])
            for number in range(options.streams)
        ]
        names = options.variants.split(",")
        runs = {name: Run(options, clients, source, name == "standby") for name in names}
        until = time.monotonic() + options.seconds
        for _ in range(options.rounds):
            for name, one in runs.items():
                with ServerUnderTest({**chosen, **VARIANTS[name]}) as server:
                    asyncio.run(one.serve(server, until))
    return {
        "streams": options.streams,
        "context": options.context,
        **{name: one.metrics() for name, one in runs.items()},
        "broken": [f"{name}: {what}" for name, one in runs.items() for what in one.broken],
    }


@dataclass
class Client:
    """Asks one question again and again.

    number: also its seed. prompt: token ids. model: an adapter's name; None: the model itself.
    moved: when pieces came, in monotonic seconds. reference: its first answer.
    """

    number: int
    prompt: list[int]
    model: str | None = None
    moved: list[float] = field(default_factory=list[float])
    reference: str | None = None

    async def ask(self, api: aiohttp.ClientSession, url: str, tokens: int) -> str:
        """The text of one answer; RuntimeError for anything but a stream that ends well."""
        extra = {"seed": self.number, "skip_special_tokens": False}
        endpoint = Endpoint(
            url, model=self.model, temperature=0.8, include_usage=False, extra_body=extra
        )
        body = endpoint.encode(SampleRequest(tokens, prompt_ids=self.prompt)).body
        text, finish = "", None
        async with api.post(endpoint.api_url, data=body, headers=endpoint.headers) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    data = msgspec.json.decode(line[len("data: ") :])
                    if "error" in data:
                        raise RuntimeError(str(data["error"]))
                    for choice in data["choices"]:
                        text += choice["text"]
                        finish = choice["finish_reason"] or finish
                        self.moved.append(time.monotonic())
        if finish is None:
            raise RuntimeError(f"a stream was cut after {len(text)} characters")
        return text

    def gap(self, since: float, until: float) -> float:
        """Seconds of the longest pause between two pieces that touches this time."""
        return max(self.gaps(since, until), default=0.0)

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds of all pauses that touch this time."""
        return [b - a for a, b in pairwise(self.moved) if b > since and a < until]


@dataclass(frozen=True)
class Kill:
    """gap: seconds, the longest of any stream. recomputed: tokens of all streams together. phases:
    seconds of each of TAKEOVER_PHASES."""

    gap: float
    recomputed: float
    phases: dict[str, float]


class Run:
    """One variant: its kills so far, and promises that did not hold."""

    def __init__(
        self,
        options: argparse.Namespace,
        clients: Sequence[Client],
        source: random.Random,
        standby: bool,
    ) -> None:
        self._options, self._clients, self._random = options, clients, source
        self._standby = standby
        self._starting: list[float] = []  # gaps while a standby starts
        self._calm: list[float] = []  # gaps before a kill
        self._standby_mib: list[int] = []  # of a GPU, that a standby took
        self._url = ""
        self._over = False
        self._kills: list[Kill] = []
        self._answers = self._other_texts = 0
        self.broken: list[str] = []

    async def serve(self, server: ServerUnderTest, until: float) -> None:
        """Kills the engine of `server` again and again under streams; none after `until`."""
        self._url, self._over = server.url, False
        timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as api:
            if self._clients[0].reference is None:
                await asyncio.gather(*(self._first(client, api) for client in self._clients))
            streams = [asyncio.create_task(self._stream(one, api)) for one in self._clients]
            try:
                for number in range(self._options.kills):
                    if time.monotonic() > until or len(self.broken) >= MAX_BROKEN:
                        break
                    await self._kill(server, api, first=not number)
            finally:
                self._over = True
                for stream in streams:
                    stream.cancel()
                await asyncio.gather(*streams, return_exceptions=True)

    async def _first(self, client: Client, api: aiohttp.ClientSession) -> None:
        client.reference = await client.ask(api, self._url, self._options.tokens)

    async def _stream(self, client: Client, api: aiohttp.ClientSession) -> None:
        while not self._over:
            try:
                text = await client.ask(api, self._url, self._options.tokens)
            except (OSError, RuntimeError, aiohttp.ClientError) as error:
                self.broken.append(f"client {client.number}: {error!r}")
                return
            self._answers += 1
            if text != client.reference:
                self._other_texts += 1
                if not self._options.any_text:
                    self.broken.append(f"client {client.number} got another text")

    async def _kill(self, server: ServerUnderTest, api: aiohttp.ClientSession, first: bool) -> None:
        """One kill, when all streams run, and what came of it. first: of this server."""
        await self._all_move(time.monotonic())
        if self._standby:
            await self._standby_ready(api)
        if not first:
            forget_losses(server.process.pid)
            await asyncio.sleep(HOLDER_SECONDS)
        begun = time.monotonic()
        await asyncio.sleep(self._options.calm + self._random.random() * self._options.wait)
        before = await self._metrics(api)
        at = time.monotonic()
        self._calm += [gap for one in self._clients for gap in one.gaps(begun, at)]
        if self._options.swaps:
            await asyncio.to_thread(swap_engine, server.process.pid)
        else:
            ranks = [stage for stage in server.pids() if stage.startswith("engine-0-")]
            rank = sorted(ranks)[len(self._kills) % len(ranks)]  # one after the other
            os.kill(server.pids()[rank], signal.SIGKILL)
        count = "pipeinfer_takeovers_total"
        await self._all_move(at)
        deadline = time.monotonic() + PATIENCE
        while (after := await self._metrics(api))[count] <= before[count]:
            if time.monotonic() > deadline:
                raise TimeoutError("no takeover was counted")
            await asyncio.sleep(0.2)
        name = "pipeinfer_recomputed_tokens_total"
        end = time.monotonic()
        kill = Kill(
            max(client.gap(at, end) for client in self._clients),
            after[name] - before[name],
            {phase: after[f"pipeinfer_takeover_seconds/{phase}"] for phase in TAKEOVER_PHASES},
        )
        self._kills.append(kill)
        print(f"{len(self._kills)}: {kill}", flush=True)

    async def _standby_ready(self, api: aiohttp.ClientSession) -> None:
        begun, deadline = time.monotonic(), time.monotonic() + PATIENCE
        before = used_gpu_mib()
        await asyncio.sleep(SETTLED_SECONDS)
        while not (await self._metrics(api))["pipeinfer_standbys_ready"]:
            if time.monotonic() > deadline:
                raise TimeoutError("no standby is ready")
            await asyncio.sleep(0.2)
        self._standby_mib.append(used_gpu_mib() - before)
        now = time.monotonic()
        self._starting += [gap for one in self._clients for gap in one.gaps(begun, now)]

    async def _all_move(self, since: float) -> None:
        """Returns when every stream has moved since."""
        deadline = time.monotonic() + PATIENCE
        while any(not one.moved or one.moved[-1] <= since for one in self._clients):
            if time.monotonic() > deadline:
                raise TimeoutError("a stream stands still")
            await asyncio.sleep(LOOK)

    async def _metrics(self, api: aiohttp.ClientSession) -> dict[str, float]:
        """By name, of all groups; of a takeover's phases by name/phase."""
        async with api.get(f"{self._url}/metrics") as answer:
            text = await answer.text()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                phase = sample.labels.get("phase")
                key = sample.name if phase is None else f"{sample.name}/{phase}"
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def metrics(self) -> dict[str, Any]:
        """recomputed: tokens of all streams, by kill. standby_mib: the most that the start of a
        standby took of a GPU."""
        gaps = [kill.gap for kill in self._kills]
        return {
            "kills": len(self._kills),
            "answers": self._answers,
            "other_texts": self._other_texts,
            "gap_seconds": _spread(gaps),
            "p99_gap_calm": _p99(self._calm),
            "p99_gap_while_a_standby_starts": _p99(self._starting),
            "standby_mib": max(self._standby_mib, default=0),
            "recomputed": _spread([kill.recomputed for kill in self._kills]),
            "recomputed_of_a_stream": _spread(
                [kill.recomputed / len(self._clients) for kill in self._kills]
            ),
            **{
                f"{phase}_seconds": _spread([kill.phases[phase] for kill in self._kills])
                for phase in TAKEOVER_PHASES
            },
        }


def forget_losses(supervisor: int) -> None:
    """Kills the memory holders of a server whose supervisor is process `supervisor`. It starts new
    ones, to which the engines give what they keep, and which know of no loss."""
    for child in psutil.Process(supervisor).children():
        with suppress(psutil.NoSuchProcess):  # a child may end meanwhile
            if HOLDER_MODULE in child.cmdline():
                child.kill()


def swap_engine(supervisor: int) -> None:
    """`pipeinfer swap engine` of the server whose supervisor is process `supervisor`; returns when
    the new engine is ready."""
    topology = str(running(supervisor).file)
    command = [sys.executable, "-m", "pipeinfer", "swap", "engine", "--topology", topology]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the swap failed: {done.stderr}")


def _p99(values: Sequence[float]) -> float:
    return round(sorted(values)[int(len(values) * 0.99)], 3) if values else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    middle = statistics.median(values)
    return {"min": min(values), "p50": round(middle, 3), "max": round(max(values), 3)}

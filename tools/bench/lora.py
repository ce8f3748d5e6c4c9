"""`lora`: adapters loaded and unloaded one after the other under streams, in turns with windows of
the same length in which nothing is loaded; what streams feel of it, and what stays in memory.

Half of the streams are computed with an adapter that stays. Knows HTTP and processes; no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench import shapes
from bench.adapters import write_adapters
from bench.takeover import Client
from harness.server import ServerUnderTest, leftovers, name_of
from pipeinfer import LoRARequest
from pipeinfer.bench.client import percentiles
from pipeinfer.checkpoint.source import resolve_model

KEY = "bench"
WARM_UP = 10  # adapters that are loaded before memory is measured
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    shapes.add_config(parser)
    add("--adapters", type=int, default=100, help="each is loaded and unloaded once")
    add("--rank", type=int, default=8, help="of each adapter")
    add("--windows", type=int, default=10, help="of either kind, in turns")
    add("--streams", type=int, default=8)
    add("--context", type=int, default=100, help="tokens of each stream's prompt")
    add("--tokens", type=int, default=400, help="of each answer")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, and what was broken."""
    with (
        shapes.settings_of(options.config, settings) as chosen,
        tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder,
    ):
        model = resolve_model(str(chosen.get("model", "")))
        count = options.adapters + WARM_UP + 1
        stays, *others = write_adapters(Path(folder), model, count, options.rank)
        source, highest = random.Random(0), shapes.highest_id(chosen)
        clients = [
            Client(
                number,
                [source.randint(0, highest) for _ in range(options.context)],
                model=stays.lora_name if number % 2 else None,
            )
            for number in range(options.streams)
        ]
        lora = {"enable_lora": True, "max_lora_rank": options.rank, "api_key": KEY}
        lora["lora_modules"] = f"{stays.lora_name}={stays.lora_path}"
        with ServerUnderTest({**chosen, **lora}) as server:
            measured = Loading(server, clients, options.tokens)
            asyncio.run(measured.measure(others, options.windows))
            left = leftovers(server.process.pid)
    return {
        "adapters": options.adapters,
        "streams": options.streams,
        **measured.metrics(),
        "broken": [*measured.broken, *(f"{name}: {value} left" for name, value in left.items())],
    }


class Loading:
    """Windows in which adapters are loaded and unloaded, and calm ones, under streams.

    broken: promises that did not hold.
    """

    def __init__(self, server: ServerUnderTest, clients: Sequence[Client], tokens: int) -> None:
        self._server, self._clients, self._tokens = server, clients, tokens
        self._gaps: dict[str, list[float]] = {"loading": [], "calm": []}
        self._loads: list[float] = []
        self._mib: list[dict[str, int]] = []
        self.broken: list[str] = []

    async def measure(self, adapters: Sequence[LoRARequest], windows: int) -> None:
        """Loads the first WARM_UP of `adapters` before memory is measured, then all others, in so
        many windows."""
        headers = {"authorization": f"Bearer {KEY}"}
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as api:
            await asyncio.gather(*(one.ask(api, self._server.url, 1) for one in self._clients))
            streams = [asyncio.create_task(self._stream(one, api)) for one in self._clients]
            for adapter in adapters[:WARM_UP]:
                await self._load_and_unload(api, adapter)
            self._loads.clear()
            self._mib.append(self._memory())
            for window in range(windows):
                begun = time.monotonic()
                for adapter in adapters[WARM_UP + window :: windows]:
                    await self._load_and_unload(api, adapter)
                loaded = time.monotonic()
                await asyncio.sleep(loaded - begun)
                for name, span in (
                    ("loading", (begun, loaded)),
                    ("calm", (loaded, time.monotonic())),
                ):
                    self._gaps[name] += [gap for one in self._clients for gap in one.gaps(*span)]
            self._mib.append(self._memory())
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _stream(self, client: Client, api: aiohttp.ClientSession) -> None:
        while True:
            try:
                text = await client.ask(api, self._server.url, self._tokens)
            except (OSError, RuntimeError, aiohttp.ClientError) as error:
                self.broken.append(f"client {client.number}: {error!r}")
                return
            if text != (client.reference or text):
                self.broken.append(f"client {client.number} got another text")
            client.reference = text

    async def _load_and_unload(self, api: aiohttp.ClientSession, adapter: LoRARequest) -> None:
        begun = time.monotonic()
        body = {"lora_name": adapter.lora_name, "lora_path": adapter.lora_path}
        await self._post(api, "load", body)
        self._loads.append(time.monotonic() - begun)
        await self._post(api, "unload", {"lora_name": adapter.lora_name})

    async def _post(self, api: aiohttp.ClientSession, verb: str, body: dict[str, str]) -> None:
        async with api.post(f"{self._server.url}/v1/{verb}_lora_adapter", json=body) as answer:
            if answer.status != 200:
                self.broken.append(f"{verb}: {answer.status} {await answer.text()}")

    def _memory(self) -> dict[str, int]:
        """MiB that each stage has for itself."""
        found: dict[str, int] = {}
        for stage, pid in sorted(self._server.pids().items()):
            name = name_of(stage)
            found[name] = found.get(name, 0) + psutil.Process(pid).memory_full_info().uss // MIB
        return found

    def metrics(self) -> dict[str, Any]:
        """gap_ms: between two pieces of a stream. mib: of each stage before and after."""
        before, after = self._mib
        return {
            "load_ms": percentiles(self._loads),
            **{
                f"{name}_gap_ms": percentiles(gaps) | {"longest": max(gaps, default=0.0) * 1e3}
                for name, gaps in self._gaps.items()
            },
            "mib": {name: {"before": before[name], "after": after[name]} for name in before},
        }

"""`pipeline`: CPU time per streamed token and stage, with an engine that answers at once.

Real processes, real sockets and HTTP; only the device is missing. What is left is the price of the
pipeline itself. Knows the stages' command lines and their process ids.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from bench import instant_engine
from harness.processes import cpu_seconds
from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.bench.client import Endpoint, RequestTiming, percentiles, stream_all
from pipeinfer.bench.dataset import RandomDataset, TokenRange
from pipeinfer.checkpoint.config import read_outline
from pipeinfer.checkpoint.source import resolve_model
from pipeinfer.runtime.servers import InheritedSockets
from pipeinfer.runtime.supervisor import stop_process, wait_ready
from pipeinfer.topology import NAMES, Identity, Topology

ENGINE = Path(__file__).with_name("instant_engine.py")
SPECIAL = 16  # ids at the end of the vocabulary that are not drawn: they may have no text
IDLE = 1.0  # seconds to see what the stages cost when nobody asks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting: its tokenizer is used."""
    add = parser.add_argument
    add("--streams", type=int, default=64, help="requests at the same time")
    add("--clients", type=int, default=1, help="processes that share the streams")
    add("--prompt-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=512)
    add("--step-ms", type=float, default=0.0, help="how long the engine takes; 0: no time at all")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    metrics = measure(options, settings)
    _show(metrics)
    return metrics


def measure(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics."""
    with stages(options, settings) as (url, pids, highest), Clients(options, url, highest) as load:
        pids["client"] = load.pids
        load.send(max(options.output_tokens // 8, 1))
        idle = _used(pids)
        time.sleep(IDLE)
        before = _used(pids)
        begin = time.perf_counter()
        lines = load.send(options.output_tokens)
        seconds = time.perf_counter() - begin
        after = _used(pids)
    failed = [line.error for line in lines if not line.success]
    if failed:
        raise RuntimeError(f"{len(failed)} streams failed: {failed[0]}")
    tokens = sum(line.output_tokens for line in lines)
    cost = {name: (after[name] - before[name]) / tokens * 1e6 for name in before}
    return {
        "streams": options.streams,
        "clients": options.clients,
        "output_tokens": tokens,
        "step_ms": options.step_ms,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "cpu_us_per_token": cost,
        "cpu_us_per_token_all_stages": sum(cost[name] for name in NAMES),
        "idle_cpu_share": {name: (before[name] - idle[name]) / IDLE for name in NAMES},
        "ttft_ms": percentiles([line.ttft for line in lines]),
        "itl_ms": percentiles([gap for line in lines for gap in line.itls]),
    }


@contextmanager
def stages(
    options: argparse.Namespace, given: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, list[int]], int]]:
    """(url, process ids by the name of their stages, highest token id of a prompt) of a pipeline
    with the instant engine."""
    model = resolve_model(str(given.get("model", "")))
    settings = {**given, "model": str(model)}
    highest = max(read_outline(model).vocab_size - 1 - SPECIAL, 0)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(config.PREFIX)}
    environment[instant_engine.STEP_VARIABLE] = str(options.step_ms / 1e3)
    environment[instant_engine.HIGHEST_ID_VARIABLE] = str(highest)
    running: dict[Identity, subprocess.Popen[str]] = {}
    sockets = InheritedSockets()
    with tempfile.TemporaryDirectory(prefix="pipeinfer-") as folder:
        local = topologies.local(config.build(settings), f"ipc://{folder}/")
        values = {"log_level": "warning", **settings, "port": 0}
        file = Path(folder, "pipeinfer.toml")
        file.write_text(Topology(local.entries, values).to_toml())
        try:
            sockets.bind("127.0.0.1", 0)
            sockets.listen()
            for entry in local.entries:
                who = entry.identity
                running[who] = _start(who, file, environment, sockets)
            url = wait_ready(running[Identity("gateway")])
            pids = {n: [p.pid for who, p in running.items() if who.name == n] for n in NAMES}
            yield url, pids, highest
        finally:
            sockets.close()
            for process in running.values():  # gateways first: they end what still runs
                stop_process(process)


def _start(
    who: Identity, topology: Path, environment: dict[str, str], sockets: InheritedSockets
) -> subprocess.Popen[str]:
    if who.name == "engine":
        command = [sys.executable, str(ENGINE)]
    else:
        command = [sys.executable, "-m", "pipeinfer.runtime", who.name, "--index", str(who.index)]
    command += ["--topology", str(topology), "--group", str(who.group)]
    inherited = sockets.descriptors if who.name == "gateway" else []
    command += sockets.arguments if who.name == "gateway" else []
    output = subprocess.PIPE if who == Identity("gateway") else None
    return subprocess.Popen(command, env=environment, stdout=output, text=True, pass_fds=inherited)


class Clients:
    """The processes that ask, as a context manager. pids: theirs."""

    def __init__(self, options: argparse.Namespace, url: str, highest: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._tokens: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for number in range(options.clients):
            here, there = spawn.Pipe()
            streams = range(options.streams)[number :: options.clients]
            arguments = (there, url, highest, options.prompt_tokens, streams)
            self._tokens.append(here)
            self._processes.append(spawn.Process(target=_client, args=arguments, daemon=True))

    def __enter__(self) -> Clients:
        for process in self._processes:
            process.start()
        self.pids = [process.pid or 0 for process in self._processes]
        return self

    def __exit__(self, *_error: object) -> None:
        for tokens, process in zip(self._tokens, self._processes, strict=True):
            tokens.close()
            process.join()

    def send(self, tokens: int) -> list[RequestTiming]:
        """Streams of `tokens` each, all at once. Raises EOFError if a client has died."""
        for each in self._tokens:
            each.send(tokens)
        return [line for each in self._tokens for line in each.recv()]


def _client(asked: Connection, url: str, highest: int, prompt_tokens: int, streams: range) -> None:
    """Sends streams of as many tokens as it is told, until nobody tells any more. Their prompts are
    drawn anew each time."""
    prompt = TokenRange(prompt_tokens, prompt_tokens)
    with suppress(EOFError):
        for seed in itertools.count(1):
            tokens = asked.recv()
            drawn = RandomDataset(prompt, TokenRange(tokens, tokens), seed, highest)
            asked.send(asyncio.run(stream_all(Endpoint(url), [drawn.sample(n) for n in streams])))


def _used(pids: Mapping[str, list[int]]) -> dict[str, float]:
    return {name: sum(map(cpu_seconds, of_name)) for name, of_name in pids.items()}


def _show(metrics: Mapping[str, Any]) -> None:
    tokens, streams = metrics["output_tokens"], metrics["streams"]
    print(f"{tokens:,} tokens in {streams} streams, {metrics['tokens_per_s']:,.0f} tokens/s")
    for name, cost in metrics["cpu_us_per_token"].items():
        print(f"{name:24}{cost:10.1f} us of CPU per token")
    print(f"{'all stages':24}{metrics['cpu_us_per_token_all_stages']:10.1f}")

"""`heartbeats`: what it costs gateway, tokenizer and scheduler that all stages say they are there.

These three are real processes; all others are played by one process, which publishes what they
would, as often as they would, over sockets of their own. Knows the stages' command lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import zmq

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.bus.bus import Bus
from pipeinfer.bus.sockets import raise_socket_limits
from pipeinfer.core import EVERYONE, Send
from pipeinfer.liveness import HEARTBEAT_SECONDS, heartbeat_period
from pipeinfer.messages import GroupStatus, Heartbeat, Message, RankStatus
from pipeinfer.topology import Identity, Topology

PATIENCE = 120  # seconds until all are heard
MEASURED = ("gateway-0", "tokenizer-0", "scheduler-0")
STATISTICS = {f"statistic_number_{n}_total": 1234.5 * n for n in range(45)}  # as many as an engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; `--dp` and `--tp` are settings."""
    parser.add_argument("--seconds", type=float, default=10.0, help="that are measured")
    parser.add_argument("--every", type=float, default=0.0, help="s between heartbeats of a stage")
    parser.add_argument("--play", metavar="TOPOLOGY", help="used by the command itself")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics: the share of a core of each measured stage. Prints them too."""
    if options.play:
        asyncio.run(_play(topologies.load(options.play), options.every))
        return {}
    built = config.build(settings)
    with tempfile.TemporaryDirectory(prefix="pb-") as folder:
        topology = topologies.local(built, f"ipc://{folder}/")
        file = Path(folder, "pipeinfer.toml")
        file.write_text(topology.to_toml())
        every = options.every or heartbeat_period(len(topology.entries))
        with _processes(file, every, port := _free_port()) as pids:
            _wait_heard(port, len(topology.entries))
            before = {name: _used(pid) for name, pid in pids.items()}
            time.sleep(options.seconds)
            shares = {n: (_used(pid) - before[n]) / options.seconds for n, pid in pids.items()}
    for name, share in shares.items():
        print(f"{name:14}{share:8.2%} of a core")
    return {"stages": len(topology.entries), "seconds_between": every, "shares": shares}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _wait_heard(port: int, stages: int) -> None:
    """Until the gateway has heard everybody. RuntimeError if that takes too long."""
    ready = 0
    for _ in range(PATIENCE):
        time.sleep(1.0)
        try:
            told = json.load(_health(port))["stages"]
        except OSError:
            continue  # it starts
        ready = sum(row["state"] == "ready" for row in told)
        if (
            ready >= stages - 2
        ):  # the scheduler that is measured waits for engines, the gateway for it
            return
    raise RuntimeError(f"the gateway has heard {ready} of {stages} stages in {PATIENCE} s")


def _health(port: int) -> IO[bytes]:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
    except urllib.error.HTTPError as error:
        return error  # not every stage is ready, as it says


def _used(pid: int) -> float:
    """Seconds of processor time, of all threads."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextmanager
def _processes(file: Path, every: float, port: int) -> Iterator[dict[str, int]]:
    """The measured stages, and who plays the others; ended at the end."""
    command = [sys.executable, "-m", "pipeinfer.runtime"]
    play = [sys.executable, str(Path(__file__).parent), "heartbeats"]
    environment = {**os.environ, "PIPEINFER_PORT": str(port)}
    started = [subprocess.Popen([*play, "--play", str(file), "--every", str(every)])]
    try:
        for stage in MEASURED:
            words = [*command, stage.split("-")[0], "--topology", str(file)]
            started.append(subprocess.Popen(words, env=environment))
        yield {"player": started[0].pid} | {
            name: one.pid for name, one in zip(MEASURED, started[1:], strict=True)
        }
        ended = [one.args for one in started if one.poll() is not None]
        if ended:
            raise RuntimeError(f"ended while they were measured: {ended}")
    finally:
        for one in started:
            one.send_signal(signal.SIGKILL)
            one.wait()


async def _play(topology: Topology, every: float) -> None:
    """All but the measured stages, until it is killed; what they say is spread over the time."""
    context = zmq.Context.instance()
    raise_socket_limits(context, topology)
    others = [entry.identity for entry in topology.entries if entry.identity.id not in MEASURED]
    buses = [Bus(who, 1, topology, context) for who in others]
    for bus in buses:
        bus.bind()
    loop, lap = asyncio.get_running_loop(), 0
    beats = max(1, round(every / HEARTBEAT_SECONDS))  # one lap in so many is a heartbeat, too
    groups = max(1, round(heartbeat_period(len(topology.ids("scheduler"))) / HEARTBEAT_SECONDS))
    begin = loop.time()
    while True:
        for number, (who, bus) in enumerate(zip(others, buses, strict=True)):
            at = begin + HEARTBEAT_SECONDS * (lap + number / len(others))
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            if (lap + number) % beats == 0:
                bus.send(Send("telemetry", EVERYONE, _beat(who)))
            for word in _words(who):
                if who.name == "engine" or (lap + number) % groups == 0:
                    bus.send(Send("group", EVERYONE, word))
        lap += 1


def _beat(who: Identity) -> Heartbeat:
    return Heartbeat(
        stage=who.id,
        name=who.name,
        group=who.group,
        rank=who.rank,
        index=who.index,
        pid=1,
        incarnation=1,
        state="ready",
        stats=STATISTICS,
    )


def _words(who: Identity) -> list[Message]:
    """What a stage says on `group`."""
    if who.name == "engine":
        return [RankStatus(group=who.group, rank=who.rank, incarnation=1, state="ready")]
    if who.name == "scheduler":
        return [
            GroupStatus(
                group=who.group,
                incarnation=1,
                standing="serves",
                epoch=1,
                requests=200,
                tokens=50_000,
                capacity=1_000_000,
                evicted=5_000,
            )
        ]
    return []

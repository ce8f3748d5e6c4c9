"""`kills`: stages of a real server are killed one after another under streams; texts are compared.

The gateway is spared, for it holds the connections, unless it alone is killed (`--only gateway`):
then the server has `--reattach`, every second client resumes its stream, and the others ask again.
A text that differs from the undisturbed one,
or anything left behind, is an error. For each kind of victim: the longest pause of any stream
after each kill, in seconds. Each round kills one stage of each kind, in a drawn order.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from chaos import harms
from chaos.fault_run import Fault, FaultRun, summary
from harness.server import ServerUnderTest, Stage

REATTACH = 30.0  # seconds that streams wait for their clients where gateways die
POOL = {"kv_pages": 600, "threads": 1}  # too small for 64 streams at once: some are preempted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=120, help="of each answer, at most")
    parser.add_argument("--storm-seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="kill stages of this kind alone; the gateway only so"
    )


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, and what was broken."""
    source = random.Random(options.storm_seed)
    gateway_dies = options.only == "gateway"
    faults = FaultRun(options.streams, options.tokens, source, gateway_dies=gateway_dies)
    if gateway_dies:
        settings = {"reattach": REATTACH, **settings}
    began = time.monotonic()
    plan = Kills(source, options.kills, options.only)
    faults.serve(ServerUnderTest({**POOL, **settings}), plan)
    return {
        "kills": sum(map(len, faults.pauses.values())),
        "streams": options.streams,
        "answers": faults.answers,
        "seconds": round(time.monotonic() - began, 1),
        "pauses": {kind: summary(pauses) for kind, pauses in sorted(faults.pauses.items())},
        "broken": faults.broken,
        **(_of_gateways(faults) if gateway_dies else {}),
    }


def _of_gateways(faults: FaultRun) -> dict[str, Any]:
    """Seconds of pauses beyond a gateway's restart, of all streams that were resumed."""
    beside = sorted(faults.beside) or [0.0]
    return {
        "resumed": faults.resumed,
        "retried": faults.retried,
        "beside_restart": {
            "count": len(faults.beside),
            "p50": statistics.median(beside),
            "p99": beside[min(len(beside) * 99 // 100, len(beside) - 1)],
            "max": beside[-1],
        },
        "emptied_after": faults.emptied,
    }


def drawn(stages: list[Stage], kills: int, source: random.Random) -> list[Stage]:
    """Victims: of every kind as many, one of each kind a round, in a drawn order."""
    kinds = sorted({name for name, _, _ in stages})
    victims: list[Stage] = []
    while len(victims) < kills:
        for kind in source.sample(kinds, len(kinds)):
            victims.append(source.choice([stage for stage in stages if stage[0] == kind]))
    return victims[:kills]


class Kills:
    """So many of a server's stages of kind `only` ("": any but the gateway), as a plan."""

    def __init__(self, source: random.Random, kills: int, only: str) -> None:
        self._random, self._kills, self._only = source, kills, only

    def __call__(self, server: ServerUnderTest) -> Sequence[Fault]:
        stages = sorted(
            stage
            for stage in server.pids()
            if (self._only == "gateway") == (stage[0] == "gateway") and self._only in stage[0]
        )
        victims = drawn(stages, self._kills, self._random)
        return [self._fault(server, victim) for victim in victims]

    def _fault(self, server: ServerUnderTest, victim: Stage) -> Fault:
        kind = f"rank {victim[2]}" if victim[0] == "engine" else victim[0]
        wait = self._random.random()
        return Fault(kind, str(victim), wait, lambda: harms.kill(server, [victim]))

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
import time
from collections.abc import Mapping, Sequence
from typing import Any

from chaos import harms
from chaos.fault_run import Fault, FaultRun, summary
from harness.server import ServerUnderTest, Stage, name_of

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
    """Seconds of the pauses of all streams that were cut and resumed, and of what of these was
    beyond the gateway's restart, for which they wait where there is one gateway."""
    return {
        "resumed": faults.resumed,
        "retried": faults.retried,
        "cut": _percentiles(faults.cut),
        "beside_restart": _percentiles(faults.beside),
        "emptied_after": faults.emptied,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    at = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    named = {name: round(ordered[place], 3) for name, place in at.items()}
    return {"count": len(seconds), **named}


def drawn(stages: list[Stage], kills: int, source: random.Random) -> list[Stage]:
    """Victims: of every kind as many, one of each kind a round, in a drawn order."""
    kinds = sorted(set(map(name_of, stages)))
    victims: list[Stage] = []
    while len(victims) < kills:
        for kind in source.sample(kinds, len(kinds)):
            victims.append(source.choice([stage for stage in stages if name_of(stage) == kind]))
    return victims[:kills]


class Kills:
    """So many of a server's stages of kind `only` ("": any but the gateway), as a plan."""

    def __init__(self, source: random.Random, kills: int, only: str) -> None:
        self._random, self._kills, self._only = source, kills, only

    def __call__(self, server: ServerUnderTest) -> Sequence[Fault]:
        stages = sorted(
            stage
            for stage in server.pids()
            if (self._only == "gateway") == (name_of(stage) == "gateway") and self._only in stage
        )
        victims = drawn(stages, self._kills, self._random)
        return [self._fault(server, victim) for victim in victims]

    def _fault(self, server: ServerUnderTest, victim: Stage) -> Fault:
        kind = name_of(victim)
        if kind == "engine":
            kind = f"rank {victim.rpartition('-')[2]}"
        wait = self._random.random()
        return Fault(kind, victim, wait, lambda: harms.kill(server, [victim]))

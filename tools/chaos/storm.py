"""`storm`: a real server suffers harms of many kinds, under streams and beside hostile requests.

All is drawn from one seed. A text that differs from the undisturbed one, a stream that fails, a
process that nobody killed and that is another one now, an answer to a hostile request that its case
does not expect, a recording that hides a full disk, or anything left behind is a broken promise.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from chaos import harms
from chaos.fault_run import Fault, FaultRun, summary
from chaos.harms import KINDS, LINKS, SPARED, Broken, Harm, Network, SmallDisk, drawn
from chaos.kills import POOL
from harness.processes import Helper
from harness.server import ServerUnderTest, running
from pipeinfer.settings import ConfigurationError

SLOW = (0.05, 200_000.0)  # seconds that each piece comes late, bytes a second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("--streams", type=int, default=64)
    add("--tokens", type=int, default=120, help="of each answer, at most")
    add("--storm-seed", type=int, default=0)
    add("--harms", type=int, default=42, help="how many, of all kinds alike")
    add("--skip", type=int, default=0, help="leave out so many of the first: a storm in pieces")
    kinds = ", ".join(f"{kind} ({what})" for kind, what in KINDS.items())
    add("--kinds", default=",".join(KINDS), help=f"any of: {kinds}; default: all")
    add("--seconds", type=float, default=3.0, help="that a harm lasts which ends by itself")
    add("--rate", type=float, default=2.0, help="hostile requests a second; 0: none")
    add("--limit", type=float, default=float("inf"), help="seconds, then no harm begins any more")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics, and what was broken."""
    kinds = [kind for kind in KINDS if kind in options.kinds.split(",")]
    if unknown := sorted(set(options.kinds.split(",")) - set(KINDS)):
        raise ConfigurationError(f"--kinds: no {unknown[0]!r}; there are {', '.join(KINDS)}")
    source = random.Random(options.storm_seed)
    faults = FaultRun(options.streams, options.tokens, source, options.limit)
    began = time.monotonic()
    with ExitStack() as stack:
        storm = Storm(options, kinds, {**POOL, **settings}, stack)
        faults.serve(storm.server, storm.plan, storm.end_hostile)
    return {
        "harms": {kind: len(pauses) for kind, pauses in sorted(faults.pauses.items())},
        "streams": options.streams,
        "answers": faults.answers,
        "hostile": storm.hostile_statuses,
        "disk": storm.disk.way if storm.disk is not None else "",
        "seconds": round(time.monotonic() - began, 1),
        "pauses": {kind: summary(pauses) for kind, pauses in sorted(faults.pauses.items())},
        "broken": faults.broken + storm.broken,
    }


class Storm:
    """The server of a storm, and what is needed to hurt it. What it opens is closed with `stack`.

    Attributes:
    - disk: None where nothing is recorded
    - hostile_statuses: how many hostile requests got which status
    - broken: what hostile requests got that their cases do not expect
    """

    def __init__(
        self,
        options: argparse.Namespace,
        kinds: Sequence[str],
        settings: Mapping[str, Any],
        stack: ExitStack,
    ) -> None:
        self._options, self._kinds = options, kinds
        self._network = self.disk = None
        words: list[str] = []
        if set(kinds) & set(LINKS):
            self._network = stack.enter_context(Network(settings))
            words = ["--topology", self._network.file]
        if "full" in kinds:
            self.disk = stack.enter_context(SmallDisk())
            settings = {"record": str(self.disk.folder / "start"), **settings}
        self._stack = stack
        self._hostile: Helper | None = None
        self.hostile_statuses: dict[str, int] = {}
        self.broken: list[str] = []
        self.server = ServerUnderTest(settings, *words)

    def plan(self, server: ServerUnderTest) -> Sequence[Fault]:
        """Harms to the server that runs; from now on hostile requests come, too."""
        asked = self._options
        if asked.rate:
            how = {"url": server.url, "rate": asked.rate, "seed": asked.storm_seed}
            self._hostile = self._stack.enter_context(Helper("chaos.hostile:pester", **how))
        harms = drawn(self._kinds, list(server.pids()), asked.skip + asked.harms, asked.storm_seed)
        return [
            Fault(harm.kind, str(harm), harm.wait, partial(self._do, harm))
            for harm in harms[asked.skip :]
        ]

    def end_hostile(self) -> None:
        """No more hostile requests; returns when all are answered."""
        if self._hostile is not None:
            [did] = self._hostile.finish()
            self.hostile_statuses = did["statuses"]
            self.broken = [f"unexpected answer: {text}" for text in did["unexpected"]]

    def _do(self, harm: Harm) -> None:
        server, seconds = self.server, self._options.seconds
        if harm.kind in SPARED:
            harms.kill(server, harm.stages)
        elif harm.kind == "stop":
            harms.stop(server, harm.stages, seconds)
        elif harm.kind == "full":
            harms.unhurt(server, self._record)
        else:
            harms.unhurt(server, partial(self._trouble, harm))

    def _record(self) -> None:
        assert self.disk is not None
        topology = running(self.server.process.pid).file
        pids = self.server.pids().values()
        self.disk.record(str(topology), self._options.seconds, pids, len(self.server.log()))
        if self.disk.reason not in self.server.log():
            raise Broken("the disk is full, and the server's own recordings hide it")

    def _trouble(self, harm: Harm) -> None:
        assert self._network is not None
        how = SLOW if harm.kind == "slow" else ()
        verb = "cut" if harm.kind == "sever" else harm.kind
        self._network.change(verb, harm.stages, harm.sockets, *how)
        time.sleep(self._options.seconds)
        self._network.change("mend", harm.stages, harm.sockets)

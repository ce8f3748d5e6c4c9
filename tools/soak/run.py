"""`run`: a long mixed load of a server by client processes, and what is checked then.

First each question is asked once, to learn its answer, and some requests of the mix warm the
server up. What it holds when it is idle then, it must hold when it is idle at the end. Broken:
memory that grows, counters that do not add up (checks.py), any answer that is not what it should
be, pages, slots, requests, processes, descriptors or threads that are left.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from harness.server import ServerUnderTest, leftovers
from soak import checks
from soak.clients import Fleet
from soak.requests import MANY, questions
from soak.watching import Watcher

# A pool that is filled within the first requests and then always short of free pages. The recorder
# keeps a minute, or so much of it; a small one is full long before the first tenth is over.
SERVER = {"kv_pages": 1200, "threads": 1, "flight_recorder_mib": 1, "log_level": "warning"}
RIGHT = 0.9  # of the greedy answers that somebody knows, the share that the demo model gets right
PATIENCE = 60.0  # seconds until an idle server has closed what its clients have left
SAMPLED = {
    "gateway": ("running", "waiting", "late_rows", "flight_bytes"),
    "tokenizer": ("ledger", "encoding", "flight_bytes"),
    "scheduler": ("running", "waiting", "kept", "in_flight", "preemptions_total", "flight_bytes"),
    "engine": (
        "pages_total", "pages_free", "pages_evictable", "pages_evicted", "slots_total",
        "slots_used", "steps_in_flight", "steps_total", "flight_bytes",
    ),
    "detokenizer": ("running", "kept", "flight_bytes"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("--requests", type=int, default=100_000)
    add("--seconds", type=float, default=0.0, help="begin no request later; 0: no limit")
    add("--mix-seed", type=int, default=0, help="of questions and requests")
    add("--questions", type=int, default=MANY, help="that are asked again and again")
    add("--concurrency", type=int, default=64, help="requests under way, of all processes")
    add("--processes", type=int, default=2, help="of clients")
    add("--warm-up", type=int, default=500, help="requests before the server counts as warm")
    add("--every", type=float, default=1.0, help="seconds between samples")
    add("--memory-percent", type=float, default=checks.MOST, help="growth that is no leak")
    add("--samples", type=Path, metavar="OUT", help="write the samples there, as JSON lines")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; "broken" names the promises that were not kept."""
    with tempfile.TemporaryDirectory(prefix="pipeinfer-soak-") as folder:
        chosen = {**SERVER, "flight_dir": folder, **settings}
        with ServerUnderTest(chosen) as server, Watcher(server) as watcher:
            soak = Soak(options, server, watcher, Path(folder, "answers.json"))
            metrics = soak.run()
            metrics["broken"] += soak.log()
    return metrics


class Soak:
    """One run. `samples`: all, in order."""

    def __init__(
        self, options: argparse.Namespace, server: ServerUnderTest, watcher: Watcher, answers: Path
    ) -> None:
        self._options, self._server, self._watcher = options, server, watcher
        self._answers = answers
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._broken: list[str] = []
        self.samples: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        """Everything in its order."""
        file = self._options.samples.open("w") if self._options.samples else None
        try:
            self._learn()
            warm = self._options.warm_up
            self._load("warm-up", (0, warm), file)
            before = self._idle("idle before", None, file)
            began = time.monotonic()
            done = self._load("load", (warm, warm + self._options.requests), file)
            seconds = time.monotonic() - began
            after = self._idle("idle after", before, file)
        finally:
            if file is not None:
                file.close()
        return self._judged(done, seconds, before, after)

    def log(self) -> list[str]:
        """What the log of the server says that it should not."""
        found = self._server.tracebacks()
        return [f"{found} tracebacks in the log: {self._server.log()[-2000:]}"] if found else []

    def _learn(self) -> None:
        known = questions(self._options.mix_seed, self._options.questions)
        answers = self._clients([{"share": None, "concurrency": 1, "seconds": 0.0, "expected": ""}])
        ordered = [answers.get(number, ["", "lost"]) for number in range(len(known))]
        self._answers.write_text(json.dumps(ordered))
        asked = [
            (one.right, text) for one, (text, _) in zip(known, ordered, strict=True) if one.right
        ]
        right = sum(right == text for right, text in asked)
        if right < RIGHT * len(asked):
            self._broken.append(f"only {right} of {len(asked)} known answers were right")

    def _load(self, phase: str, numbers: tuple[int, int], file: IO[str] | None) -> int:
        """Sends requests of the mix; how many."""
        options = self._options
        each, more = divmod(options.concurrency, options.processes)
        shares = [
            {
                "share": (numbers[0] + place, numbers[1], options.processes),
                "concurrency": each + (place < more),
                "seconds": options.seconds,
                "expected": str(self._answers),
            }
            for place in range(options.processes)
        ]
        before = self._asked()
        self._clients(shares, phase, file)
        return self._asked() - before

    def _clients(
        self, shares: list[dict[str, Any]], phase: str = "", file: IO[str] | None = None
    ) -> dict[int, list[str]]:
        """Runs processes of clients, with samples if the phase has a name."""
        options = self._options
        common = {"url": self._server.url, "mix": (options.mix_seed, options.questions)}
        with Fleet([{**common, **one} for one in shares]) as fleet:
            due = time.monotonic()
            while fleet.running():
                if phase:
                    self._keep(self._watcher.sample(), phase, fleet.done, file)
                due = max(due + self._options.every, time.monotonic())
                time.sleep(max(due - time.monotonic(), 0.0))
            fleet.wait()
        self._counts.update(fleet.counts)
        self._broken += fleet.wrong[:10]
        return fleet.answers

    def _asked(self) -> int:
        """Requests so far, those whose answer was lost among them."""
        asked = (many for name, many in self._counts.items() if name.startswith("asked "))
        return sum(asked) + self._counts["lost"]

    def _keep(
        self, sample: dict[str, Any], phase: str, done: int, file: IO[str] | None
    ) -> dict[str, Any]:
        """With what is looked at later, and no more."""
        sample["stages"] = {
            stage: {name: stats[name] for name in SAMPLED[stage.partition("-")[0]]}
            for stage, stats in sample["stages"].items()
        }
        at = round(time.monotonic() - self._began, 3)
        sample = {"at": at, "phase": phase, "done": done, **sample}
        self.samples.append(sample)
        if file is not None:
            file.write(json.dumps(sample) + "\n")
            file.flush()
        return sample

    def _idle(
        self, phase: str, before: dict[str, Any] | None, file: IO[str] | None
    ) -> dict[str, Any]:
        """A sample when nothing is left to do. Connections may take some moments to close."""
        left = leftovers(self._server.process.pid)
        if left:
            self._broken.append(f"{phase}: left behind: {left}")
        deadline, was = time.monotonic() + PATIENCE, before
        while True:
            self._watcher.said(anew=True)
            now = self._watcher.sample()
            same = was is not None and not checks.changed(was, now)
            if same or time.monotonic() > deadline:
                return self._keep(now, phase, self._asked(), file)
            was = before or now

    def _judged(
        self, done: int, seconds: float, before: dict[str, Any], after: dict[str, Any]
    ) -> dict[str, Any]:
        load = [sample for sample in self.samples if sample["phase"] == "load"]
        grown, broken = checks.judged(load, done, self._options.memory_percent)
        stages = self._watcher.said(anew=True)
        sums = checks.added_up(self._counts, self._watcher.metrics(), stages)
        return {
            "requests": done,
            "seconds": round(seconds, 1),
            "requests_per_s": round(done / seconds, 1),
            "concurrency": self._options.concurrency,
            "cores": os.cpu_count(),
            "counts": dict(sorted(self._counts.items())),
            "samples": len(load),
            "memory": grown,
            "idle_before": _shown(before),
            "idle_after": _shown(after),
            "preemptions": sum(
                stats["preemptions_total"]
                for name, stats in stages.items()
                if name.startswith("scheduler")
            ),
            "broken": self._broken + broken + sums + checks.changed(before, after)
            + checks.in_use(after),
        }  # fmt: skip


def _shown(sample: Mapping[str, Any]) -> dict[str, list[int]]:
    """[descriptors, threads] of each process."""
    found = sample["processes"].items()
    return {name: [one["descriptors"], one["threads"]] for name, one in found}

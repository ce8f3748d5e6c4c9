"""`startup`: seconds from process start to the ready line, and to the first token of a stream.

And where the time of the engines goes. Knows a server's command line, its HTTP side and its log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import shapes
from pipeinfer.bench.client import Endpoint, stream_all
from pipeinfer.bench.dataset import SampleRequest
from pipeinfer.runtime.supervisor import LocalServer, ServerNotReady

FIRST = SampleRequest(1, prompt_ids=[1, 2, 3, 4, 5, 6, 7, 8])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    shapes.add_config(parser)


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    with shapes.settings_of(options.config, settings) as chosen:
        rounds = [_once(chosen) for _ in range(options.rounds)]
    ready, first = [one.ready for one in rounds], [one.first_token for one in rounds]
    print(f"{'ready':24}{statistics.median(ready):10.2f} s")
    print(f"{'first token':24}{statistics.median(first):10.2f} s")
    phases = {engine: _medians(rounds, engine) for engine in sorted(rounds[0].engines)}
    for engine, seconds in phases.items():
        print(f"\n{engine}")
        for phase, took in seconds.items():
            print(f"  {phase:22}{took:10.2f} s")
    graphs = sorted({line for one in rounds for line in one.graphs})
    print("\n".join(graphs))
    return {
        "ready_seconds": statistics.median(ready),
        "first_token_seconds": statistics.median(first),
        "all_ready_seconds": ready,
        "all_first_token_seconds": first,
        "engine_seconds": phases,
        "graphs": graphs,
    }


@dataclass(frozen=True)
class _Round:
    """One start; engines: seconds by phase, by engine. graphs: how many were captured by then."""

    ready: float
    first_token: float
    engines: dict[str, dict[str, float]]
    graphs: list[str]


def _medians(rounds: Sequence[_Round], engine: str) -> dict[str, float]:
    every = [one.engines[engine] for one in rounds]
    return {phase: statistics.median(one[phase] for one in every) for phase in every[0]}


def _once(settings: Mapping[str, Any]) -> _Round:
    told = {"log_level": "info", "log_format": "json"}
    with tempfile.TemporaryFile("w+", prefix="pipeinfer-bench-") as log:
        begin = time.perf_counter()
        try:
            with LocalServer({"all_graphs_first": False, **settings, **told}, log) as server:
                ready = time.perf_counter() - begin
                (line,) = asyncio.run(stream_all(Endpoint(server.url), [FIRST]))
        except ServerNotReady:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        log.seek(0)
        said = [found for text in log if "start" in (found := _line(text))]
    if not line.success:
        raise RuntimeError(f"the first request failed: {line.error}")
    engines = {one["stage"]: one["start"] for one in said}
    graphs = [f"{one['stage']}: {one['graphs']} graphs" for one in said if one["graphs"]]
    return _Round(ready, line.chunk_times[0] - begin, engines, graphs)


def _line(text: str) -> dict[str, Any]:
    """An object of the log; a library may write other lines."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

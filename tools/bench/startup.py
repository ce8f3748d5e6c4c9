"""`startup`: seconds from process start to the ready line, and to the first token of a stream.

Knows a server's command line and its HTTP side.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import shapes
from bench.processes import Server
from pipeinfer.bench import streaming
from pipeinfer.bench.endpoint import Endpoint
from pipeinfer.bench.prompts import Request

FIRST = Request(1, ids=[1, 2, 3, 4, 5, 6, 7, 8])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--config", metavar="SHAPE", help=f"random weights: {', '.join(shapes.SHAPES)} or a file")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as temporary:
        if options.config:
            shapes.write_folder(Path(temporary), shapes.shape(options.config))
            settings = {"load_format": "dummy", **settings, "model": temporary}
        rounds = [_once(settings) for _ in range(options.rounds)]
    ready, first = ([one[part] for one in rounds] for part in (0, 1))
    print(f"{'ready':24}{statistics.median(ready):10.2f} s")
    print(f"{'first token':24}{statistics.median(first):10.2f} s")
    return {
        "ready_seconds": statistics.median(ready),
        "first_token_seconds": statistics.median(first),
        "all_ready_seconds": ready,
        "all_first_token_seconds": first,
    }


def _once(settings: Mapping[str, Any]) -> tuple[float, float]:
    begin = time.perf_counter()
    with Server(settings) as server:
        ready = time.perf_counter() - begin
        (line,) = asyncio.run(streaming.together(Endpoint(server.url), [FIRST]))
    if not line.complete:
        raise RuntimeError(f"the first request failed: {line.error}")
    return ready, line.pieces[0] - begin

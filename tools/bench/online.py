"""`online`: latency over HTTP while requests arrive at given rates, or as a trace recorded them.

Knows what to send and when; the server under test is its own, or any at `--url`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pipeinfer.bench.client import (
    WARMUP_SEED,
    Endpoint,
    GoodputTarget,
    RequestTiming,
    benchmark_metrics,
    stream_all,
)
from pipeinfer.bench.dataset import RandomDataset, SampleRequest, TokenRange
from pipeinfer.bench.runner import OpenLoop, load_trace, poisson_arrivals, run_load
from pipeinfer.runtime.supervisor import LocalServer
from pipeinfer.settings import ConfigurationError

WARM_UP = 4  # requests before the first rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--url", help="a running server; without it one is started")
    add("--rates", type=_rates, default=[1.0, 2.0, 4.0], metavar="R,R",
        help="requests a second; inf: all at once")  # fmt: skip
    add("--requests", type=int, default=64, help="at each rate")
    add("--prompt-tokens", type=TokenRange.parse, default=TokenRange(16, 256), metavar="LOW:HIGH")
    add("--output-tokens", type=TokenRange.parse, default=TokenRange(16, 128), metavar="LOW:HIGH")
    add("--highest-id", type=int, default=255, help="prompts are drawn from the ids up to this")
    add("--work-seed", type=int, default=0)
    add("--trace", type=Path, help="JSON lines: timestamp, input_length, output_length")
    add("--speed", type=float, default=1.0, help="of the trace")
    add("--good-ttft", type=float, default=1000.0, metavar="MS")
    add("--good-itl", type=float, default=100.0, metavar="MS", help="mean of a request")


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rates such as 1,2,4")
    return rates


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too. The latencies at the top are those of the last point."""
    if options.url and settings:
        raise ConfigurationError("--url measures a server that has its settings already")
    target = GoodputTarget(options.good_ttft / 1e3, options.good_itl / 1e3)
    points: list[dict[str, Any]] = []
    lines: list[list[RequestTiming]] = []
    server = nullcontext() if options.url else LocalServer(settings)
    with server as started:
        endpoint = Endpoint(options.url if started is None else started.url)
        asyncio.run(stream_all(endpoint, _warm_up(options)))
        for rate in [None] if options.trace else options.rates:
            lines.append(run_load(endpoint, *plan(options, rate)).timings)
            points.append({"rate": rate, **benchmark_metrics(lines[-1], target)})
            _show(points[-1], lines[-1])
    last = points[-1]
    return {name: last[name] for name in ("tokens_per_s", "ttft_ms", "itl_ms", "e2e_ms")} | {
        "targets_ms": {"ttft": options.good_ttft, "itl": options.good_itl},
        "points": points,
    }


def plan(options: argparse.Namespace, rate: float | None) -> tuple[RandomDataset, OpenLoop]:
    """What is sent and when, at `rate` or as in the trace."""
    spans, seed = (options.prompt_tokens, options.output_tokens), options.work_seed
    if options.trace:
        trace = load_trace(options.trace)
        lengths = [(entry.input_length, entry.output_length) for entry in trace]
        times = [entry.timestamp / options.speed for entry in trace]
        return RandomDataset(*spans, seed, options.highest_id, lengths), OpenLoop(
            list(enumerate(times))
        )
    rate = rate or 1.0
    times = poisson_arrivals(rate, seed, options.requests)
    # Another seed at each rate: no prompt is in the prefix cache.
    seed = round(seed * 1e9 + min(rate, 1e5) * 1e3)
    return RandomDataset(*spans, seed, options.highest_id), OpenLoop(list(enumerate(times)))


def _warm_up(options: argparse.Namespace) -> list[SampleRequest]:
    drawn = RandomDataset(TokenRange(8, 16), TokenRange(2, 4), WARMUP_SEED, options.highest_id)
    return [drawn.sample(index) for index in range(WARM_UP)]


def _show(point: Mapping[str, Any], lines: Sequence[RequestTiming]) -> None:
    rate = "trace" if point["rate"] is None else f"{point['rate']:g}/s"
    print(
        f"{rate:>8}: {point['tokens_per_s']:8.1f} tokens/s, prompts "
        f"{point['prompt_tokens_per_s']:.0f}, goodput {point['goodput_per_s']:.2f}/s "
        f"({point['good_share']:.0%}), {point['failed']} failed"
    )
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        if point[name]:
            shown = "  ".join(f"{which} {value:9.1f}" for which, value in point[name].items())
            print(f"{name.removesuffix('_ms'):>8}  {shown}  ms")
    errors = {line.error for line in lines if line.error}
    for error in sorted(errors)[:3]:
        print(f"   error: {error}", file=sys.stderr)

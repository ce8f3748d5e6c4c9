"""`watched`: what it costs that people look at a server's page, beside the same load unwatched.

Each looker reads /monitor/events as the page's Pipeline tab does; with --browsers it is that page.
Browsers take the server's cores, so of latencies those beside feeds count; CPU times do in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from bench import browsers
from bench.online import plan
from bench.processes import cpu_seconds
from pipeinfer.bench.client import Endpoint
from pipeinfer.bench.local_server import LocalServer
from pipeinfer.bench.metrics import GoodputTarget, benchmark_metrics
from pipeinfer.bench.options import TokenRange
from pipeinfer.bench.runner import run_load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--feeds", type=int, default=20, help="that are read at a time")
    add("--browsers", type=int, default=0, metavar="N", help="pages in Chromium instead of feeds")
    add("--rounds", type=int, default=3, help="each once without and once with them")
    add("--rate", type=float, default=2.0, help="requests a second")
    add("--requests", type=int, default=40, help="in each half of a round")
    add("--prompt-tokens", type=TokenRange.parse, default=TokenRange(16, 64), metavar="LOW:HIGH")
    add("--output-tokens", type=TokenRange.parse, default=TokenRange(64, 64), metavar="LOW:HIGH")
    add("--highest-id", type=int, default=255, help="prompts are drawn from the ids up to this")
    add("--work-seed", type=int, default=0)
    parser.set_defaults(trace=None)


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics: of each stage the share of a core, and latencies, without and with lookers."""
    if options.browsers:
        browsers.check()
    lookers = options.browsers or options.feeds
    rounds: list[dict[str, Any]] = []
    with LocalServer(settings) as server:
        endpoint = Endpoint(server.url)
        run_load(endpoint, *plan(options, options.rate))  # warm
        for number in range(options.rounds):
            options.work_seed = number + 1
            halves: dict[str, dict[str, Any]] = {}
            for count in (0, lookers):
                with _looking(server.url, count, options.browsers > 0) as pages:
                    halves[str(count)] = _measured(server.url, endpoint, options)
                halves[str(count)]["pages"] = pages
            rounds.append(halves)
            _show(number, halves, "browsers" if options.browsers else "feeds")
    shares = {
        count: _medians([one[count]["share"] for one in rounds]) for count in ("0", str(lookers))
    }
    more = _medians([_more(one["0"], one[str(lookers)]) for one in rounds])
    print("more of a core:", ", ".join(f"{name} {share:+.2%}" for name, share in more.items()))
    if options.browsers:
        pages = [page for one in rounds for page in one[str(lookers)]["pages"]]
        least = min(page["changes_per_s"] for page in pages)
        print(f"Each page changed at least {least:.1f} times a second. Browsers had cores of the "
              "server: its latency is seen without --browsers.")  # fmt: skip
    return {
        "feeds": 0 if options.browsers else options.feeds,
        "browsers": options.browsers,
        "shares": shares,
        "more": more,
        "rounds": rounds,
    }


def _more(bare: Mapping[str, Any], watched: Mapping[str, Any]) -> dict[str, float]:
    """The share of a core that each stage took for lookers: both halves have the same requests, but
    beside browsers these may take longer, which spreads the same work."""
    spent, before = watched["cpu_seconds"], bare["cpu_seconds"]
    return {name: (spent[name] - before[name]) / watched["seconds"] for name in spent}


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _measured(url: str, endpoint: Endpoint, options: argparse.Namespace) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health") as answer:
        stages = json.load(answer)["stages"]
    before = {row["name"]: cpu_seconds(row["pid"]) for row in stages}
    taken = run_load(endpoint, *plan(options, options.rate))
    used = {row["name"]: cpu_seconds(row["pid"]) - before[row["name"]] for row in stages}
    seconds = max(line.end_time for line in taken.timings) - min(line.due for line in taken.timings)
    summary = benchmark_metrics(taken.timings, GoodputTarget(1.0, 0.1))
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "share": {name: spent / seconds for name, spent in used.items()},
        "itl_ms": summary["itl_ms"],
        "ttft_ms": summary["ttft_ms"],
        "failed": summary["failed"],
    }


def _looking(url: str, count: int, pages: bool) -> AbstractContextManager[list[dict[str, float]]]:
    """So many look meanwhile. It gives what each page had shown, at its end."""
    if not count:
        return nullcontext([])
    return browsers.opened(url, count) if pages else _reading(url, count)


@contextmanager
def _reading(url: str, feeds: int) -> Iterator[list[dict[str, float]]]:
    """So many read the feed, in threads that do nothing with it."""
    answers = [urllib.request.urlopen(f"{url}/monitor/events", timeout=60) for _ in range(feeds)]
    over = threading.Event()

    def read(answer: Any) -> None:
        while not over.is_set() and answer.read1():
            pass
        answer.close()

    threads = [threading.Thread(target=read, args=(one,), daemon=True) for one in answers]
    for thread in threads:
        thread.start()
    try:
        yield []
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _show(number: int, halves: Mapping[str, Any], kind: str) -> None:
    for count, half in halves.items():
        shares = ", ".join(f"{name} {share:.1%}" for name, share in half["share"].items())
        itl = half["itl_ms"]
        print(f"round {number}, {count:>2} {kind}: {shares}; itl p50 {itl['p50']:.2f}, "
              f"p99 {itl['p99']:.2f} ms; {half['failed']} failed", flush=True)  # fmt: skip

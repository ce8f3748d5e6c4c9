"""Prompts beside streams over HTTP, on one GPU: `python tests/gpu/two_targets.py TREE [TREE ...]`.

Starts a server of each TREE (a checkout) in turn and measures the same loads on each; prints a line
of JSON for each load. `--record DIR` records the Poisson loads of the last TREE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tools"), str(HERE.parent.parent / "src")]

from bench import latency, shapes, streaming, traces  # noqa: E402
from bench.processes import stop, wait_ready  # noqa: E402
from bench.workload import Span  # noqa: E402

TARGET = latency.Target(0.5, 0.025)
HIGHEST_ID = 10_000
LONG = Span(7000, 9000), Span(64, 128)
USUAL = Span(100, 1024), Span(100, 400)
ANY = Span(100, 8000), Span(64, 256)


def measured(
    url: str, arrivals: list[traces.Arrival], clients: Executor, many: int
) -> list[latency.Timeline]:
    """By `many` processes, each with its share of the requests."""
    begin = time.perf_counter() + 0.3  # the clock is the same in all processes
    shares = [arrivals[first::many] for first in range(many)]
    found = clients.map(sent, [url] * many, shares, [begin] * many)
    return [line for lines in found for line in lines]


def sent(url: str, arrivals: list[traces.Arrival], begin: float) -> list[latency.Timeline]:
    return asyncio.run(_sent(url, arrivals, begin))


async def _sent(url: str, arrivals: list[traces.Arrival], begin: float) -> list[latency.Timeline]:
    async with streaming.session() as client:

        async def one(arrival: traces.Arrival) -> latency.Timeline:
            due = begin + arrival.at
            await asyncio.sleep(due - time.perf_counter())
            return await streaming.stream(
                client, url, arrival.prompt, arrival.output, due, temperature=0.6
            )

        return list(await asyncio.gather(*map(one, arrivals)))


def show(tree: str, load: str, lines: list[latency.Timeline]) -> None:
    """One line of JSON, rounded."""
    found = latency.summary(lines, TARGET)
    gaps = [max(line.gaps, default=0.0) for line in lines if line.complete]
    apart = [line.per_token for line in lines if line.complete]
    firsts = sorted((round(line.first * 1e3), round(line.due, 3)) for line in lines if line.pieces)
    start = min(line.due for line in lines)
    found |= {
        "tree": tree,
        "load": load,
        "tpot_ms": latency.percentiles(apart),
        "good_by_gaps": sum(
            line.complete and line.first <= 0.5 and max(line.gaps, default=0.0) <= 0.025
            for line in lines
        )
        / len(lines),
        "longest_of_each_ms": latency.percentiles(gaps),
        "slowest_firsts": [(ms, round(due - start, 2)) for ms, due in firsts[-6:]],
        "errors": sorted({line.error for line in lines if line.error})[:2],
    }
    print(json.dumps(found, default=str), flush=True)


def started(tree: Path, arguments: list[str], log: Path) -> subprocess.Popen[str]:
    """`pipeinfer serve` of that checkout; its log goes to a file."""
    path = os.pathsep.join((str(tree / "src"), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "pipeinfer", "serve", *arguments, "--port", "0"]
    with log.open("w") as errors:
        return subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=errors,
            text=True,
        )  # fmt: skip


def loads(options: argparse.Namespace) -> list[tuple[str, list[traces.Arrival]]]:
    """By name; the first ones are not shown."""
    seed = options.seed
    warm = [
        ("warm", traces.poisson(40.0, 24, *USUAL, HIGHEST_ID, 10**6)),
        ("warm", traces.poisson(1e5, 12, *LONG, HIGHEST_ID, 10**6 + 1)),
    ]
    made = {
        "long": lambda n: traces.poisson(1e9, 64, *LONG, HIGHEST_ID, seed + n),
        "p32": lambda n: traces.poisson(32.0, 256, *USUAL, HIGHEST_ID, seed + 100 + n),
        "p64": lambda n: traces.poisson(64.0, 384, *USUAL, HIGHEST_ID, seed + 200 + n),
    }
    made |= {
        f"any{rate}": lambda n, rate=rate: traces.poisson(
            rate, round(6 * rate), *ANY, HIGHEST_ID, seed + 300 + n
        )
        for rate in options.rates
    }
    chosen = [(name, made[name](n)) for n, name in enumerate(options.loads.split(",")) if name]
    chosen += [(f"any{rate}", made[f"any{rate}"](n)) for n, rate in enumerate(options.rates)]
    return warm + chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", type=Path, nargs="+", metavar="TREE")
    parser.add_argument("--config", default="qwen3-0.6b")
    parser.add_argument("--loads", default="long,p32,p64,long", help="long, p32, p64")
    parser.add_argument("--rates", type=lambda text: [float(word) for word in text.split(",")],
                        default=[], help="of prompts of 100 to 8,000 tokens")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="processes that send requests")
    parser.add_argument("--out", type=Path, default=Path("/tmp"), help="for the servers' logs")
    parser.add_argument("--record", type=Path, help="of the last TREE")
    parser.add_argument("--settings", default="", help="of all servers, with spaces between")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.clients, spawn) as clients,
    ):
        shapes.write_folder(Path(folder), shapes.shape(options.config))
        for number, tree in enumerate(options.trees):
            arguments = [folder, "--load-format", "dummy", "--device", "cuda", "--max-model-len",
                         "16384", *options.settings.split()]  # fmt: skip
            if options.record and number == len(options.trees) - 1:
                arguments += ["--record", str(options.record)]
            began = time.perf_counter()
            server = started(tree, arguments, options.out / f"server-{number}.log")
            try:
                url = wait_ready(server)
                print(json.dumps({"tree": str(tree), "ready_s": time.perf_counter() - began}))
                for load, arrivals in loads(options):
                    lines = measured(url, arrivals, clients, options.clients)
                    if load != "warm":
                        show(str(tree), load, lines)
            finally:
                stop(server)


if __name__ == "__main__":
    main()

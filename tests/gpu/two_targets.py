"""Prompts beside streams over HTTP, on one GPU: `python tests/gpu/two_targets.py TREE [TREE ...]`.

Starts a server of each TREE (a checkout) in turn and measures the same loads on each; prints a line
of JSON for each load. `--record DIR` records the Poisson loads of the last TREE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "tools"), str(HERE.parent.parent / "src")]

from bench import shapes  # noqa: E402
from pipeinfer.bench.client import (  # noqa: E402
    Endpoint,
    GoodputTarget,
    RequestTiming,
    benchmark_metrics,
    percentiles,
)
from pipeinfer.bench.dataset import RandomDataset, TokenRange  # noqa: E402
from pipeinfer.bench.runner import (  # noqa: E402
    OpenLoop,
    poisson_arrivals,
    run_load,
)
from pipeinfer.runtime.supervisor import stop_process, wait_ready  # noqa: E402

Load = tuple[RandomDataset, list[float]]  # what is sent, and when
TARGET = GoodputTarget(0.5, 0.025)
HIGHEST_ID = 10_000
LONG = TokenRange(7000, 9000), TokenRange(64, 128)
USUAL = TokenRange(100, 1024), TokenRange(100, 400)
ANY = TokenRange(100, 8000), TokenRange(64, 256)
TAIL = TokenRange(50, 200), TokenRange(100, 300)  # behind a prefix that others have
AT_ONCE = 1e9  # requests a second


def measured(url: str, load: Load, many: int) -> list[RequestTiming]:
    """By `many` processes, each with its share of the requests."""
    drawn, times = load
    endpoint = Endpoint(url, temperature=0.6)
    return run_load(endpoint, drawn, OpenLoop(list(enumerate(times))), many).timings


def show(tree: str, load: str, lines: list[RequestTiming]) -> None:
    """One line of JSON, rounded."""
    found = benchmark_metrics(lines, TARGET)
    gaps = [max(line.itls, default=0.0) for line in lines if line.success]
    apart = [line.tpot for line in lines if line.success]
    firsts = sorted(
        (round(line.ttft * 1e3), round(line.due, 3)) for line in lines if line.chunk_times
    )
    start = min(line.due for line in lines)
    found |= {
        "tree": tree,
        "load": load,
        "tpot_ms": percentiles(apart),
        "good_by_gaps": sum(
            line.success and line.ttft <= 0.5 and max(line.itls, default=0.0) <= 0.025
            for line in lines
        )
        / len(lines),
        "longest_of_each_ms": percentiles(gaps),
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


def poisson(
    rate: float, requests: int, prompts: TokenRange, outputs: TokenRange, seed: int, **prefixes: int
) -> Load:
    drawn = RandomDataset(prompts, outputs, seed, HIGHEST_ID, **prefixes)
    return drawn, poisson_arrivals(rate, seed, requests)


def alike(prefixes: int, tokens: int, seed: int) -> Load:
    """256 requests at once, each behind one of so many prefixes."""
    return poisson(AT_ONCE, 256, *TAIL, seed, num_prefixes=prefixes, prefix_len=tokens)


def loads(options: argparse.Namespace) -> list[tuple[str, Load]]:
    """By name; the first ones are not shown."""
    seed = options.seed
    warm = [
        ("warm", poisson(40.0, 24, *USUAL, 10**6)),
        ("warm", poisson(1e5, 12, *LONG, 10**6 + 1)),
    ]
    made = {
        "long": lambda n: poisson(AT_ONCE, 64, *LONG, seed + n),
        "all": lambda n: poisson(
            AT_ONCE, 256, TokenRange(100, 1024), TokenRange(100, 1024), seed + n
        ),
        "short": lambda n: poisson(
            AT_ONCE, 1024, TokenRange(50, 200), TokenRange(50, 150), seed + n
        ),
        "shared": lambda n: alike(16, 4000, seed + n),
        "apart": lambda n: poisson(
            AT_ONCE, 256, TokenRange(550, 700), TokenRange(100, 300), seed + n
        ),
        "system8000": lambda n: alike(1, 8000, seed + n),
        "system100": lambda n: alike(1, 100, seed + n),
        "p32": lambda n: poisson(32.0, 256, *USUAL, seed + 100 + n),
        "p64": lambda n: poisson(64.0, 384, *USUAL, seed + 200 + n),
    }
    made |= {
        f"any{rate}": lambda n, rate=rate: poisson(rate, round(6 * rate), *ANY, seed + 300 + n)
        for rate in options.rates
    }
    chosen = [(name, made[name](n)) for n, name in enumerate(options.loads.split(",")) if name]
    chosen += [(f"any{rate}", made[f"any{rate}"](n)) for n, rate in enumerate(options.rates)]
    return warm + chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", type=Path, nargs="+", metavar="TREE")
    parser.add_argument("--config", default="qwen3-0.6b")
    parser.add_argument(
        "--loads",
        default="long,p32,p64,long",
        help="long, p32, p64, all, short, shared, apart, system8000, system100",
    )
    parser.add_argument("--rates", type=lambda text: [float(word) for word in text.split(",")],
                        default=[], help="of prompts of 100 to 8,000 tokens")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="processes that send requests")
    parser.add_argument("--out", type=Path, default=Path("/tmp"), help="for the servers' logs")
    parser.add_argument("--record", type=Path, help="of the last TREE")
    parser.add_argument("--settings", default="", help="of all servers, with spaces between")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
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
                for name, load in loads(options):
                    lines = measured(url, load, options.clients)
                    if name != "warm":
                        show(str(tree), name, lines)
            finally:
                stop_process(server)


if __name__ == "__main__":
    main()

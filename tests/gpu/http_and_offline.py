"""The same requests over HTTP and offline: `python tests/gpu/http_and_offline.py [TREE ...]`.

For each TREE (a checkout; default: this one) and each --settings: all requests at once through
`LLM`, then over HTTP by four client processes. One line of JSON each, with what every stage spent
for a token. Without a GPU: `--config "" --device cpu --part 32`, which takes the demo model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
TREE = "HTTP_AND_OFFLINE_TREE"  # of the checkout whose `LLM` is measured
sys.path[:0] = [str(ROOT / "tools"), str(Path(os.environ.get(TREE, ROOT), "src"))]

from bench import batch, shapes  # noqa: E402
from bench.workload import Work, uniform  # noqa: E402
from harness.processes import cpu_seconds  # noqa: E402
from pipeinfer import LLM  # noqa: E402
from pipeinfer import settings as config  # noqa: E402
from pipeinfer.bench.client import (  # noqa: E402
    Endpoint,
    GoodputTarget,
    benchmark_metrics,
)
from pipeinfer.bench.dataset import (  # noqa: E402
    CustomDataset,
    SampleRequest,
    TokenRange,
)
from pipeinfer.bench.runner import OpenLoop, run_load  # noqa: E402
from pipeinfer.runtime.supervisor import stop_process, wait_ready  # noqa: E402

LOADS = {  # requests, tokens in, tokens out
    "many": (256, TokenRange(100, 1024), TokenRange(100, 1024)),
    "short": (1024, TokenRange(50, 200), TokenRange(50, 150)),
}
TARGET = GoodputTarget(0.5, 0.025)
TEMPERATURE = 0.6


def works(options: argparse.Namespace) -> Iterator[tuple[str, int, Work]]:
    """(load, round, requests); no prompt comes twice. Load "warm" is not shown."""
    for load in ("many", "short"):
        count, prompts, _ = LOADS[load]
        most = min(count // options.part, 64)
        yield "warm", 0, uniform(most, prompts, TokenRange(16, 16), options.highest, -1)
    for turn in range(options.rounds):
        for load in options.loads.split(","):
            count, *spans = LOADS[load]
            work = uniform(count // options.part, *spans, options.highest, options.seed + turn)
            yield load, turn, work


def offline(options: argparse.Namespace, words: list[str]) -> None:
    """In a process of its own: a line of JSON for each of the works."""
    settings = dict(config.parse_flags(words))
    settings.pop("gateways", None)  # `LLM` is its own
    with LLM(**settings) as llm:
        for load, turn, work in works(options):
            found = batch.measure(llm, work, TEMPERATURE)
            if load != "warm":
                told = {
                    "load": load, "round": turn, "way": "offline", "seconds": found.seconds,
                    "tokens_per_s": work.output_tokens / found.seconds,
                    "engine_idle": found.share_without("busy"),
                }  # fmt: skip
                print(json.dumps(told), flush=True)


def stages(url: str) -> dict[str, int]:
    """{stage: its process}."""
    with urllib.request.urlopen(f"{url}/health") as answer:
        return {one["name"]: one["pid"] for one in json.load(answer)["stages"]}


def over_http(options: argparse.Namespace, url: str) -> Iterator[dict[str, object]]:
    """A result for each of the works and, where asked for, once more with the longest first, as
    `LLM` sends them."""
    pids = stages(url)
    for load, turn, work in works(options):
        asked = [
            SampleRequest(count, prompt_ids=ids)
            for ids, count in zip(work.prompts, work.outputs, strict=True)
        ]
        if options.longest_first:
            asked.sort(key=lambda one: -one.output_len)
        arrivals = OpenLoop([(number, 0.0) for number in range(len(asked))])
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        endpoint = Endpoint(url, temperature=TEMPERATURE)
        lines = run_load(endpoint, CustomDataset(asked), arrivals, options.clients).timings
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        if load == "warm":
            continue
        found = benchmark_metrics(lines, TARGET)
        yield {
            "load": load, "round": turn, "way": "HTTP", "seconds": found["seconds"],
            "tokens_per_s": found["tokens_per_s"],
            "ttft_ms": {k: round(v, 1) for k, v in found["ttft_ms"].items()},
            "itl_ms": {k: round(v, 2) for k, v in found["itl_ms"].items()},
            "cpu_us_per_token": {
                name: round(used * 1e6 / work.output_tokens, 2) for name, used in spent.items()
            },
            "failed": found["failed"],
        }  # fmt: skip


def served(
    tree: Path, options: argparse.Namespace, words: list[str]
) -> Iterator[dict[str, object]]:
    """What a server of that checkout does; its log goes to stderr."""
    command = [sys.executable, "-m", "pipeinfer", "serve", *words, "--port", "0"]
    server = subprocess.Popen(
        command, env=_environment(tree), stdout=subprocess.PIPE, text=True, cwd=tree
    )
    try:
        yield from over_http(options, wait_ready(server))
    finally:
        stop_process(server)


def alone(tree: Path, options: argparse.Namespace, words: list[str]) -> list[dict[str, object]]:
    """What `LLM` of that checkout does."""
    given = json.dumps(vars(options) | {"words": words, "trees": [], "settings": []})
    command = [sys.executable, str(HERE), "--offline", given]
    told = subprocess.run(
        command, env=_environment(tree), stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]


def _environment(tree: Path) -> dict[str, str]:
    path = os.pathsep.join((str(tree / "src"), os.environ.get("PYTHONPATH", "")))
    return os.environ | {TREE: str(tree), "PYTHONPATH": path}


def show(tree: Path, settings: str, found: list[dict[str, object]]) -> None:
    """The results, and for each load the median of HTTP over offline in one round."""
    for one in found:
        print(json.dumps({"tree": str(tree), "settings": settings} | one), flush=True)
    rates = {(one["load"], one["round"], one["way"]): one["tokens_per_s"] for one in found}
    for load in dict.fromkeys(load for load, _, _ in rates):
        ratios = [
            rate / rates[load, turn, "offline"]  # type: ignore[operator]
            for (of, turn, way), rate in rates.items()
            if of == load and way == "HTTP"
        ]
        print(f"{load}: HTTP {statistics.median(ratios):.3f} of offline, {settings or 'defaults'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", type=Path, nargs="*", metavar="TREE", default=[ROOT])
    parser.add_argument("--config", default="qwen3-0.6b", help="shape; empty: the demo model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--loads", default="many,short")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", type=int, default=1, help="only one of so many requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4, help="processes that send requests")
    parser.add_argument("--longest-first", action="store_true", help="over HTTP, as LLM does")
    parser.add_argument("--settings", action="append", help="of LLM and server; may come again")
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offline:
        given = argparse.Namespace(**json.loads(options.offline))
        offline(given, given.words)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.highest = 10_000 if options.config else 200
        common = ["--device", options.device, "--log-level", "warning"]
        if options.config:
            shapes.write_folder(Path(folder), shapes.shape(options.config))
            common += [folder, "--load-format", "dummy", "--max-model-len", "16384"]
        for settings in options.settings or [""]:
            words = [*common, *shlex.split(settings)]
            for tree in options.trees:
                tree = tree.resolve()
                found = [*alone(tree, options, words), *served(tree, options, words)]
                show(tree, settings, found)


if __name__ == "__main__":
    main()

"""The same work through pipeinfer and through transformers' `generate`, in turns, side by side.

transformers gets a process of its own while no process of pipeinfer runs, and the other way round;
both get the same threads, the same weights and the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench import batch, shapes, workload
from bench.workload import Work
from harness.processes import Others
from pipeinfer import LLM

THREADS = 2
SCRIPT = Path(__file__).with_name("transformers_generate.py")
SHAPE = "llama-100m"


class Theirs(msgspec.Struct, frozen=True):
    """What transformers_generate.py prints: seconds of the whole work, and each request's ids."""

    seconds: float
    outputs: list[list[int]]


def run(options: argparse.Namespace, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The metrics; `folder` is for the random checkpoint."""
    threads = int(settings.setdefault("threads", THREADS))
    config = shapes.shape(options.config or SHAPE)
    model = shapes.write_folder(folder / "model", config)
    _call(threads, "make", str(model), str(options.work_seed))
    work, warm = (
        workload.short_and_long(seed, config["vocab_size"] - 1, requests)
        for seed, requests in ((options.work_seed, min(options.requests, 64)), (-1, 8))
    )
    settings |= {"model": str(model), "dtype": "float32"}
    sizes = sorted({len(work.prompts), min(16, len(work.prompts))})
    ours: list[batch.Measured] = []
    theirs: dict[int, list[Theirs]] = {size: [] for size in sizes}
    shares = []
    for _ in range(options.rounds or 3):
        with Others() as others:
            ours.append(_pipeinfer(settings, work, warm))
        shares.append(others.share)
        _say("pipeinfer", work.output_tokens / ours[-1].seconds, others)
        for size in sizes:
            with Others() as others:
                theirs[size].append(_transformers(threads, model, work, warm, size, folder))
            shares.append(others.share)
            rate = work.output_tokens / theirs[size][-1].seconds
            _say(f"transformers, batches of {size}", rate, others)
        sizes = [min(sizes, key=lambda size: _median(theirs[size]))]  # the faster goes on
    metrics = batch.summary(work, ours) | _comparison(work, ours, theirs, sizes[0])
    metrics |= {"threads": threads, "used_by_others": max(shares)}
    batch.show(metrics)
    print(
        f"{'transformers tokens/s':24}{metrics['transformers_tokens_per_s']:12.1f}"
        f"  (batches of {sizes[0]})\n{'ratio':24}{metrics['ratio']:12.2f}"
    )
    return metrics


def _say(what: str, rate: float, others: Others) -> None:
    print(
        f"{what:32}{rate:8.1f} tokens/s; others used {others.share:.0%} of the machine", flush=True
    )


def _comparison(
    work: Work, ours: list[batch.Measured], theirs: dict[int, list[Theirs]], best: int
) -> dict[str, Any]:
    pairs = zip(ours[0].outputs, theirs[best][0].outputs, strict=True)
    return {
        "ratio": _median(theirs[best]) / statistics.median(one.seconds for one in ours),
        "transformers_tokens_per_s": work.output_tokens / _median(theirs[best]),
        "transformers_batch": best,
        "transformers_seconds": {
            str(size): [one.seconds for one in runs] for size, runs in theirs.items()
        },
        "requests_with_equal_tokens": sum(a == b for a, b in pairs),
    }


def _median(runs: list[Theirs]) -> float:
    return statistics.median(one.seconds for one in runs)


def _pipeinfer(settings: dict[str, Any], work: Work, warm: Work) -> batch.Measured:
    with LLM(**settings) as llm:
        batch.measure(llm, warm, 0.0)
        return batch.measure(llm, work, 0.0)


def _transformers(
    threads: int, model: Path, work: Work, warm: Work, size: int, folder: Path
) -> Theirs:
    file = folder / "work.json"
    file.write_text(
        json.dumps(
            {
                "model": str(model),
                "batch": size,
                "work": {"prompts": work.prompts, "outputs": work.outputs},
                "warm": {"prompts": warm.prompts, "outputs": warm.outputs},
            }
        )
    )
    return msgspec.json.decode(_call(threads, "run", str(file)), type=Theirs)


def _call(threads: int, *arguments: str) -> str:
    """What the script prints last; CalledProcessError if it fails, its words on stderr."""
    command = [sys.executable, str(SCRIPT), str(threads), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return done.stdout.strip().rpartition("\n")[2]

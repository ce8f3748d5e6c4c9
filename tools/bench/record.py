"""`record`: the cost of recording. The same work without it, with flight recorder, with --record.

In turns, so that whatever else the machine does hits all three alike; each turn is compared with
its own neighbours. Knows what to measure; how a batch or the bare pipeline runs is in offline.py
and pipeline.py.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import offline, pipeline, processes, workload
from bench.workload import Span
from pipeinfer import LLM

RESAMPLES, CONFIDENCE = 10_000, 0.95
WAYS = ("off", "flight", "record")

Numbers = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--pairs", type=int, default=10, help="turns of all three")
    add("--requests", type=int, default=128)
    add("--prompt-tokens", type=Span.parse, default=Span(16, 64), metavar="LOW:HIGH")
    add("--output-tokens", type=Span.parse, default=Span(64, 192), metavar="LOW:HIGH")
    add("--without-model", action="store_true", help="the bare pipeline over HTTP: CPU per step")
    add("--streams", type=int, default=64, help="of the bare pipeline")
    add("--step-ms", type=float, default=10.0, help="of its engine, which computes nothing")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    measure = _bare if options.without_model else _batch
    rounds: dict[str, list[Numbers]] = {way: [] for way in WAYS}
    with processes.Others() as others:
        for turn in range(options.pairs):
            for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
                rounds[way].append(_one(measure, options, settings, way))
    metrics: dict[str, Any] = {"pairs": options.pairs, "others_share": others.share}
    for name in rounds["off"][0]:
        values = {way: [numbers[name] for numbers in rounds[way]] for way in WAYS}
        metrics[name] = {way: statistics.median(values[way]) for way in WAYS}
        metrics[f"{name}_ratio"] = {
            way: ratio(values["off"], values[way], options.pairs) for way in WAYS[1:]
        }
    show(metrics)
    return metrics


def ratio(base: Sequence[float], other: Sequence[float], seed: int) -> Numbers:
    """Median of other / base over the pairs, and its bootstrap confidence interval."""
    ratios = [b / a for a, b in zip(base, other, strict=True)]
    source = random.Random(seed)
    medians = sorted(
        statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    outside = int((1 - CONFIDENCE) / 2 * RESAMPLES)
    return {
        "median": statistics.median(ratios),
        "low": medians[outside],
        "high": medians[-1 - outside],
    }


def show(metrics: Mapping[str, Any]) -> None:
    """Prints the medians and the ratios to `off`."""
    for name, values in metrics.items():
        if not isinstance(values, dict) or name.endswith("_ratio"):
            continue
        for way in WAYS:
            line = f"{name:28}{way:8}{values[way]:12,.1f}"
            if way != "off":
                r = metrics[f"{name}_ratio"][way]
                line += f"   x {r['median']:.4f}  ({r['low']:.4f} to {r['high']:.4f})"
            print(line)
    print(f"{'used by others':28}{'':8}{metrics['others_share']:12.1%}")


def _one(
    measure: Callable[[argparse.Namespace, dict[str, Any]], Numbers],
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    way: str,
) -> Numbers:
    folder = tempfile.mkdtemp(prefix="pipeinfer-bench-")
    try:
        ways = {"off": {"flight_recorder_mib": 0}, "flight": {}, "record": {"record": folder}}
        numbers = measure(options, {**settings, **ways[way]})
        recorded = len(list(Path(folder).glob("*.pitrace")))
        if (recorded > 0) != (way == "record"):
            raise RuntimeError(f"{way}: {recorded} recordings were written")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{way:8}" + "".join(f"{name} {value:,.1f}  " for name, value in numbers.items()))
    return numbers


def _batch(options: argparse.Namespace, settings: dict[str, Any]) -> Numbers:
    """A batch through the offline class, all processes and the model."""
    spans = options.prompt_tokens, options.output_tokens
    highest = offline.highest_id(settings)
    work = workload.uniform(options.requests, *spans, highest, 0)
    warm = workload.uniform(min(options.requests, 16), Span(16, 64), Span(4, 8), highest, -1)
    with LLM(**settings) as llm:
        offline.measure(llm, warm, 1.0)
        measured = offline.measure(llm, work, 1.0)
    return {"tokens_per_s": work.output_tokens / measured.seconds}


def _bare(options: argparse.Namespace, settings: dict[str, Any]) -> Numbers:
    """CPU time of each stage and step with an engine that computes nothing."""
    asked = argparse.Namespace(
        streams=options.streams, prompt_tokens=options.prompt_tokens.high,
        output_tokens=options.output_tokens.high, step_ms=options.step_ms,
    )  # fmt: skip
    metrics = pipeline.measure(asked, settings)
    cost = metrics["cpu_us_per_token"]
    steps = {f"{name}_us_per_step": us * options.streams for name, us in cost.items()}
    steps.pop("client_us_per_step")
    return {**steps, "all_us_per_step": sum(steps.values())}

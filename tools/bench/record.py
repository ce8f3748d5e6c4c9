"""`record`: the cost of recording. The same processes do the same work, recorded and not, in turns.

Whatever else the machine does hits both alike, and each pair is compared with its neighbour. Knows
what to measure; how a batch or the bare pipeline runs is in offline.py and pipeline.py.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import batch, host_cost, offline, pipeline, processes, shapes, workload
from bench.switch import Switch, topology_here
from bench.workload import Work
from pipeinfer import LLM
from pipeinfer.bench.options import TokenRange

RESAMPLES, CONFIDENCE = 10_000, 0.95
OFF, ON = WAYS = ("off", "record")
SETTLE = 0.5  # seconds after a batch, in which a recorder writes what it still has

Numbers = dict[str, float]
Batch = Callable[[int], Numbers]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--pairs", type=int, default=10, help="pairs, each of one batch recorded and one not")
    add("--config", metavar="SHAPE", help=f"random weights: {', '.join(shapes.SHAPES)} or a file")
    add("--requests", type=int, default=128)
    add("--prompt-tokens", type=TokenRange.parse, default=TokenRange(16, 64), metavar="LOW:HIGH")
    add("--output-tokens", type=TokenRange.parse, default=TokenRange(64, 192), metavar="LOW:HIGH")
    add("--without-model", action="store_true", help="the bare pipeline over HTTP")
    add("--streams", type=int, default=64, help="of the bare pipeline")
    add("--step-ms", type=float, default=10.0, help="of its engine, which computes nothing")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    place = _bare if options.without_model else _offline
    rounds: dict[str, list[Numbers]] = {way: [] for way in WAYS}
    # Without the flight recorder, for that takes the same rows: nothing would be left to compare.
    with (
        processes.Others() as others,
        place(options, {"flight_recorder_mib": 0, **settings}) as (switch, batch),
        tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder,
    ):
        for pair in range(options.pairs):
            for way in WAYS if pair % 2 == 0 else WAYS[::-1]:
                numbers = _one(switch, batch, Path(folder), way, 2 * pair + (way == ON))
                rounds[way].append(numbers)
        recorded = switch.recorded
    tokens = sum(numbers["tokens"] for numbers in rounds[ON])
    metrics = summary(rounds, options.pairs) | {
        "recorded_bytes_per_token": recorded / tokens,
        "others_share": others.share,
    }
    show(metrics)
    return metrics


def summary(rounds: Mapping[str, list[Numbers]], seed: int) -> dict[str, Any]:
    """{name: {"off": median, "record": median, "ratio": {median, low, high}}} of all numbers."""
    metrics: dict[str, Any] = {"pairs": len(rounds[OFF])}
    for name in rounds[OFF][0]:
        off, on = ([numbers[name] for numbers in rounds[way]] for way in WAYS)
        metrics[name] = {OFF: statistics.median(off), ON: statistics.median(on)}
        if all(off):
            metrics[name]["ratio"] = ratio(off, on, seed)
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
    """Prints the medians and the ratios."""
    print(f"{metrics['pairs']} pairs{'':22}{OFF:>12}{ON:>12}   ratio (95 % interval)")
    for name, values in metrics.items():
        if not isinstance(values, dict):
            continue
        line = f"{name.replace('_', ' '):30}{values[OFF]:12,.1f}{values[ON]:12,.1f}"
        if (r := values.get("ratio")) is not None:
            line += f"   {r['median']:.4f} ({r['low']:.4f} to {r['high']:.4f})"
        print(line)
    print(f"{'recorded bytes per token':30}{'':12}{metrics['recorded_bytes_per_token']:12,.1f}")
    print(f"{'used by others':30}{'':12}{metrics['others_share']:12.1%}")


def _one(switch: Switch, batch: Batch, folder: Path, way: str, number: int) -> Numbers:
    """One batch; CPU time counts until a recorder has written what it has."""
    if way == ON:
        switch.start(folder / str(number))
    before = switch.cpu_seconds()
    numbers = batch(number)
    time.sleep(SETTLE)
    used = {stage: after - before[stage] for stage, after in switch.cpu_seconds().items()}
    if way == ON:
        switch.stop()
    tokens, steps = numbers["tokens"], numbers.pop("steps")
    numbers["cpu_us_per_token"] = 1e6 * sum(used.values()) / tokens
    numbers["cpu_us_per_step"] = 1e6 * sum(used.values()) / steps
    for stage, seconds in used.items():
        numbers[f"{stage.partition('-')[0]}_us_per_step"] = 1e6 * seconds / steps
    print(f"{way:8}" + "".join(f"{name} {value:,.1f}  " for name, value in numbers.items()))
    return numbers


@contextmanager
def _offline(
    options: argparse.Namespace, settings: dict[str, Any]
) -> Iterator[tuple[Switch, Batch]]:
    """A batch through the offline class: all processes, and the model."""
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder:
        if options.config:
            shapes.write_folder(Path(folder), shapes.shape(options.config))
            settings |= {"model": folder, "load_format": settings.get("load_format", "dummy")}
        highest = offline.highest_id(settings)
        spans = options.prompt_tokens, options.output_tokens
        work = workload.uniform(options.requests, *spans, highest, 0)
        cuda = settings.get("device") == "cuda"
        with LLM(**settings) as llm, Switch(topology_here()) as switch:
            batch.measure(llm, shifted(work, -1, highest), 1.0)
            yield switch, lambda number: _batch(llm, shifted(work, number, highest), cuda)


def shifted(work: Work, number: int, highest: int) -> Work:
    """The same lengths with other ids, so that no prompt is in the prefix cache."""
    change = 1 + number * 37
    return Work([[(i + change) % (highest + 1) for i in ids] for ids in work.prompts], work.outputs)


def _batch(llm: LLM, work: Work, cuda: bool) -> Numbers:
    """`host_us_per_step`: of the engine's host; on a CPU without what is the model's."""
    before = llm.stats()[batch.ENGINE]["steps_total"]
    measured = batch.measure(llm, work, 1.0)
    steps = llm.stats()[batch.ENGINE]["steps_total"] - before
    parts = [part for part in host_cost.PARTS if cuda or part not in ("forward", "sample")]
    host = sum(measured.engine[part] for part in parts)
    return {
        "tokens": float(work.output_tokens),
        "steps": steps,
        "tokens_per_s": work.output_tokens / measured.seconds,
        "host_us_per_step": 1e6 * host / steps,
    }


@contextmanager
def _bare(options: argparse.Namespace, settings: dict[str, Any]) -> Iterator[tuple[Switch, Batch]]:
    """Streams over HTTP from an engine that computes nothing; every step is one of all streams."""
    asked = argparse.Namespace(
        streams=options.streams, prompt_tokens=options.prompt_tokens.high,
        output_tokens=options.output_tokens.high, step_ms=options.step_ms,
    )  # fmt: skip

    with (
        pipeline.stages(asked, settings) as (url, _, topology, highest),
        Switch(topology) as switch,
    ):

        def batch(number: int) -> Numbers:
            begun = time.perf_counter()
            lines = asyncio.run(pipeline.send(asked, url, highest, asked.output_tokens, number))
            seconds = time.perf_counter() - begun
            if failed := [line.error for line in lines if not line.success]:
                raise RuntimeError(f"{len(failed)} streams failed: {failed[0]}")
            tokens = float(sum(line.output_tokens for line in lines))
            steps = float(asked.output_tokens)
            return {"tokens": tokens, "steps": steps, "tokens_per_s": tokens / seconds}

        batch(-1)
        yield switch, batch

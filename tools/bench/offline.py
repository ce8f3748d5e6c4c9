"""`offline`: tokens per second of one batch of requests through the offline class, all processes.

With `--against transformers` the same work goes to transformers' own `generate`, in turns. Knows
what to measure; how transformers is driven is in against_transformers.py.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import against_transformers, floor, host_cost, shapes, workload
from bench.host_cost import HostCost
from bench.workload import Span, Work
from pipeinfer import LLM, SamplingParams
from pipeinfer.models.source import resolve_model

HEARTBEAT = 0.5  # seconds between the statistics of an engine
ENGINE = "engine-0-0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    add("--config", metavar="SHAPE", help=f"random weights: {', '.join(shapes.SHAPES)} or a file")
    add("--requests", type=int, default=256)
    add("--prompt-tokens", type=Span.parse, default=Span(100, 1024), metavar="LOW:HIGH")
    add("--output-tokens", type=Span.parse, default=Span(100, 1024), metavar="LOW:HIGH")
    add("--temperature", type=float, default=0.6)
    add("--work-seed", type=int, default=0, help="seed of prompts and lengths")
    add("--rounds", type=int, default=0, help="default: 1, or 3 against transformers")
    add("--flops", type=float, default=0.0, help="of the machine, per second, for the efficiency")
    add("--bandwidth", type=float, default=0.0, help="of its memory, bytes per second")
    add("--against", choices=["transformers"], help="measure it too: 64 requests, greedy, float32")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    with tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as temporary:
        if options.against:
            return against_transformers.run(options, dict(settings), Path(temporary))
        return _alone(options, dict(settings), Path(temporary))


@dataclass(frozen=True)
class Measured:
    """One batch: wall seconds, seconds of the engine's parts ("busy", "forward" ...), and what its
    host spent on each phase of a step.
    """

    seconds: float
    engine: dict[str, float]
    outputs: list[list[int]]
    host: HostCost

    def share_without(self, part: str) -> float:
        """The share of the wall time that was not spent in `part`."""
        return max(0.0, 1.0 - self.engine[part] / self.seconds)


def measure(llm: LLM, work: Work, temperature: float) -> Measured:
    """Runs `work` as one call; RuntimeError if any request got another number of tokens."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=index)
        for index, tokens in enumerate(work.outputs)
    ]
    before = _engine(llm)
    begin = time.perf_counter()
    results = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    after = _engine(llm)
    outputs = [result.outputs[0].token_ids for result in results]
    if [len(ids) for ids in outputs] != work.outputs:
        raise RuntimeError("not every request got the tokens that it asked for")
    old, new = host_cost.seconds(before), host_cost.seconds(after)
    parts = {name: new[name] - old.get(name, 0.0) for name in new}
    return Measured(seconds, parts, outputs, host_cost.read(after))


def _engine(llm: LLM) -> dict[str, float]:
    """The engine's statistics, when it is idle and has said so."""
    time.sleep(2 * HEARTBEAT)
    return llm.stats()[ENGINE]


def _alone(options: argparse.Namespace, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    if options.config:
        shapes.write_folder(folder, shapes.shape(options.config))
        settings |= {"model": str(folder), "load_format": settings.get("load_format", "dummy")}
    highest = highest_id(settings)
    spans = options.prompt_tokens, options.output_tokens
    work = workload.uniform(options.requests, *spans, highest, options.work_seed)
    warm = workload.uniform(min(options.requests, 16), Span(16, 64), Span(4, 8), highest, -1)
    rounds = []
    for _ in range(options.rounds or 1):
        with LLM(**settings) as llm:  # anew each time, so that no prompt is in the prefix cache
            measure(llm, warm, options.temperature)
            rounds.append(measure(llm, work, options.temperature))
            print(f"{work.output_tokens / rounds[-1].seconds:10.1f} tokens/s", flush=True)
    metrics = summary(work, rounds)
    if settings.get("device") == "cuda":
        metrics["outside_model_share"] = None  # a GPU engine counts launches there, not computing
    if options.flops and options.bandwidth:
        metrics |= _efficiency(options, settings, work, metrics["seconds"])
    show(metrics)
    return metrics


def summary(work: Work, rounds: list[Measured]) -> dict[str, Any]:
    """The metrics of several rounds of the same work: those of the median round."""
    middle = sorted(rounds, key=lambda one: one.seconds)[len(rounds) // 2]
    steps = middle.engine
    return {
        "tokens_per_s": work.output_tokens / middle.seconds,
        "seconds": middle.seconds,
        "all_seconds": [one.seconds for one in rounds],
        "requests": len(work.prompts),
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "idle_share": middle.share_without("busy"),
        "outside_model_share": middle.share_without("forward"),
        "engine_seconds": {name: steps[name] for name in (*host_cost.PARTS, "busy")},
        **middle.host.metrics(),
    }


def show(metrics: Mapping[str, Any]) -> None:
    """Prints the summary."""
    for name in ("requests", "prompt_tokens", "output_tokens"):
        print(f"{name.replace('_', ' '):24}{metrics[name]:12,}")
    print(f"{'seconds (median)':24}{metrics['seconds']:12.2f}")
    print(f"{'tokens/s':24}{metrics['tokens_per_s']:12.1f}")
    if metrics["outside_model_share"] is not None:
        print(f"{'outside the model':24}{metrics['outside_model_share']:12.1%}")
    print(f"{'engine idle':24}{metrics['idle_share']:12.1%}")
    host_cost.show(metrics)
    if "efficiency" in metrics:
        print(f"{'efficiency':24}{metrics['efficiency']:12.1%}")


def highest_id(settings: Mapping[str, Any]) -> int:
    """The highest token id of the prompts that are drawn."""
    return min(10_000, _vocabulary(settings) - 1)


def _vocabulary(settings: Mapping[str, Any]) -> int:
    from pipeinfer.models.config import read_config

    return read_config(resolve_model(settings.get("model", ""))).vocab_size


def _efficiency(
    options: argparse.Namespace, settings: Mapping[str, Any], work: Work, seconds: float
) -> dict[str, float]:
    from pipeinfer import settings as config
    from pipeinfer.engine.loading import choose

    built = config.build(settings)
    folder = resolve_model(built.model, built.revision)
    dtype = str(choose(built, folder).dtype).removeprefix("torch.")
    machine = floor.Machine(options.flops, options.bandwidth)
    least = floor.floor_seconds(work, floor.model_size(folder, dtype), machine, built.max_running)
    return {"efficiency": least / seconds, "floor_seconds": least}

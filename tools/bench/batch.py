"""One batch of requests through the offline class: how long, and where the engine's time went.

Phases of the host's time of a step come from the engine's statistics
(docs/reference/statistics.md).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.workload import Work
from pipeinfer import LLM, LoRARequest, SamplingParams

PARTS = ("plan", "pack", "upload", "attention_plan", "forward", "masks", "sample", "result")
ALL = "host"
PERCENTILES = ("p50", "p99")

ByPhase = dict[str, dict[str, float]]


@dataclass(frozen=True)
class HostCost:
    """Microseconds by phase, p50 and p99: of all steps since the engine last paused, and of its
    decode steps with nearly `full_rows` rows, the most there were; `full_steps` of them.
    """

    every: ByPhase
    full: ByPhase
    full_rows: int
    full_steps: int

    def metrics(self) -> dict[str, Any]:
        """As they stand in a result file."""
        return {
            "host_step_us": self.every,
            "host_full_step_us": self.full,
            "host_full_rows": self.full_rows,
            "host_full_steps": self.full_steps,
        }


def phase_seconds(stats: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part, and "busy" and "idle", since the engine started."""
    end = "_seconds"
    return {name.removesuffix(end): v for name, v in stats.items() if name.endswith(end)}


def read(stats: Mapping[str, float]) -> HostCost:
    """The percentiles in an engine's statistics."""

    def by_phase(unit: str) -> ByPhase:
        return {
            phase: {which: stats[f"{phase}_{unit}_{which}"] for which in PERCENTILES}
            for phase in (*PARTS, ALL)
        }

    rows, steps = int(stats["full_rows"]), int(stats["full_steps"])
    return HostCost(by_phase("us"), by_phase("full_us"), rows, steps)


def show_host_cost(metrics: Mapping[str, Any]) -> None:
    """Prints a table: what does not happen on this device is left out."""
    every, full = metrics["host_step_us"], metrics["host_full_step_us"]
    rows, steps = metrics["host_full_rows"], metrics["host_full_steps"]
    print(f"{'host, us a step':24}{'all: p50':>12}{'p99':>10}{f'{rows} rows: p50':>18}{'p99':>10}")
    for phase, times in every.items():
        if times["p99"]:
            print(
                f"  {phase.replace('_', ' '):22}{times['p50']:12.0f}{times['p99']:10.0f}"
                f"{full[phase]['p50']:18.0f}{full[phase]['p99']:10.0f}"
            )
    print(f"  ({steps} decode steps with nearly {rows} rows)")


HEARTBEAT = 0.5  # seconds between the statistics of an engine
ENGINE = "engine-0-0"


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


def measure(
    llm: LLM, work: Work, temperature: float, adapters: Sequence[LoRARequest] = ()
) -> Measured:
    """Runs `work` as one call; RuntimeError if any request got another number of tokens. adapters:
    requests have them in turns."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=index)
        for index, tokens in enumerate(work.outputs)
    ]
    before = _engine(llm)
    begin = time.perf_counter()
    chosen = [adapters[n % len(adapters)] for n in range(len(params))] if adapters else None
    results = llm.generate(work.prompts, params, use_tqdm=False, lora_request=chosen)
    seconds = time.perf_counter() - begin
    after = _engine(llm)
    outputs = [result.outputs[0].token_ids for result in results]
    if [len(ids) for ids in outputs] != work.outputs:
        raise RuntimeError("not every request got the tokens that it asked for")
    old, new = phase_seconds(before), phase_seconds(after)
    parts = {name: new[name] - old.get(name, 0.0) for name in new}
    return Measured(seconds, parts, outputs, read(after))


def _engine(llm: LLM) -> dict[str, float]:
    """The engine's statistics, when it is idle and has said so."""
    time.sleep(2 * HEARTBEAT)
    return llm.stats()[ENGINE]


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
        "engine_seconds": {name: steps[name] for name in (*PARTS, "busy")},
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
    show_host_cost(metrics)
    if "efficiency" in metrics:
        print(f"{'efficiency':24}{metrics['efficiency']:12.1%}")

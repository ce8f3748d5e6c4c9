"""What the engine's host spends on a step, phase by phase, out of the engine's statistics.

Knows the names of the statistics (docs/reference/statistics.md); measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def seconds(stats: Mapping[str, float]) -> dict[str, float]:
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


def show(metrics: Mapping[str, Any]) -> None:
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

"""Routing policies side by side, as a picture.

Knows the metrics of runs; matplotlib is needed only here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

LATENCIES = {"ttft_ms": "time to first token, ms", "itl_ms": "time between tokens, ms"}
SINGLE = {
    "tokens_per_s": "tokens per second",
    "hit_rate": "hit rate: cached / prompt tokens",
}
WHICH = ("p50", "p90", "p99")


def policies(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes a picture (the kind follows from the name's end) of the metrics of each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    for axis, (name, title) in zip(axes[0], SINGLE.items(), strict=False):
        axis.bar(list(found), [metrics[name] for metrics in found.values()], color="tab:blue")
        axis.set_title(title)
    _balance(axes[0][2], found)
    for axis, (name, title) in zip(axes[1], LATENCIES.items(), strict=False):
        for place, (policy, metrics) in enumerate(found.items()):
            heights = [metrics[name].get(which, 0.0) for which in WHICH]
            spots = [at + (place - (len(found) - 1) / 2) * 0.25 for at in range(len(WHICH))]
            axis.bar(spots, heights, 0.25, label=policy)
        axis.set_xticks(range(len(WHICH)), WHICH)
        axis.set_title(title)
        axis.legend()
    _computed(axes[1][2], found)
    figure.savefig(path)
    pyplot.close(figure)


def _balance(axis: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    axis.bar(list(found), [metrics["imbalance"] for metrics in found.values()], color="tab:orange")
    axis.axhline(1.0, color="gray", linewidth=0.8)
    axis.set_title("imbalance: largest group / mean")


def _computed(axis: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    for policy, metrics in found.items():
        axis.plot(sorted(metrics["computed_per_group"]), label=policy)
    axis.set_ylim(bottom=0)
    axis.set_title("tokens computed by each group, in order")
    axis.legend()

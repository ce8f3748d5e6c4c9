"""Routing policies side by side, and steps by their targets, as pictures.

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


def targets(path: Path, found: Mapping[str, Any]) -> None:
    """Writes a picture of what `simulate targets` found: what steps take, and which are chosen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    itl, steps, chosen = found["targets_ms"]["itl"], found["steps"], found["chosen"]
    left.plot([one["tokens"] for one in steps], [one["ms"] for one in steps], marker="o")
    left.axhline(found["decodes_ms"], color="gray", linestyle=":", label="decodes alone")
    left.set_xlabel("tokens of a step")
    left.set_title(f"what a step takes beside {found['streams']} streams, ms")
    right.step(
        [one["waiting"] for one in chosen], [one["ms"] for one in chosen], where="mid", marker="o"
    )
    right.set_xlabel("prompt tokens that wait, all just come")
    right.set_title("the step that is chosen, ms")
    for axis in (left, right):
        if itl:
            axis.axhline(itl, color="tab:red", linestyle="--", label="--itl-target")
        axis.legend()
        axis.set_ylim(bottom=0)
    rate = right.twinx()
    rate.plot(
        [one["waiting"] for one in chosen], [one["rate"] / 1e3 for one in chosen],
        color="tab:green", label="thousand prompt tokens a second",
    )  # fmt: skip
    rate.set_ylim(bottom=0)
    rate.legend(loc="lower right")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)

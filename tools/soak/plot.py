"""`plot`: the samples of a soak as a picture: memory, descriptors, threads, pages, slots, queues.

Knows the file of samples; matplotlib is needed only here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from soak.checks import MIB, MOST, TENTHS, levels

COLORS = {
    "supervisor": "tab:gray", "gateway": "tab:blue", "tokenizer": "tab:orange",
    "scheduler": "tab:green", "engine": "tab:red", "detokenizer": "tab:purple",
}  # fmt: skip
Sample = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.add_argument("samples", type=Path, help="what `run --samples` wrote")
    parser.add_argument("picture", type=Path, help="the kind follows from the name's end")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the picture."""
    samples = [json.loads(line) for line in options.samples.read_text().splitlines()]
    picture(options.picture, samples)
    return {}


def picture(path: Path, samples: Sequence[Sample]) -> None:
    """Draws what was sampled while requests ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = [sample for sample in samples if sample["phase"] == "load"]
    thousands = [sample["done"] / 1e3 for sample in samples]
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7), constrained_layout=True)
    _processes(axes[0][0], thousands, samples, lambda one: one["own"] / MIB)
    axes[0][0].set_title("memory of each process, MiB")
    axes[0][0].set_yscale("log")
    _growth(axes[0][1], samples)
    _processes(axes[0][2], thousands, samples, lambda one: one["descriptors"])
    axes[0][2].set_title("open descriptors")
    _processes(axes[1][0], thousands, samples, lambda one: one["threads"])
    axes[1][0].set_title("threads")
    _pages(axes[1][1], thousands, samples)
    _requests(axes[1][2], thousands, samples)
    for axis in axes.flat:
        axis.axvspan(0, thousands[-1] / TENTHS, color="black", alpha=0.06, linewidth=0)
        axis.set_xlim(0, thousands[-1])
        axis.set_xlabel("requests, thousands")
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _kind(name: str) -> str:
    return name.partition(" ")[0].partition("-")[0]


def _processes(
    axis: Any, places: list[float], samples: Sequence[Sample], value: Callable[[Any], float]
) -> None:
    """A line for each process, a colour for each kind; what lives for a moment is left out."""
    names = set.intersection(*(set(sample["processes"]) for sample in samples))
    named: set[str] = set()
    for name in sorted(names, key=lambda name: (list(COLORS).index(_kind(name)), name)):
        kind = "".join((_kind(name), " child" if name.endswith("child") else ""))
        label = None if kind in named else kind
        named.add(kind)
        style = ":" if kind.endswith("child") else "-"
        values = [value(sample["processes"][name]) for sample in samples]
        axis.plot(places, values, style, color=COLORS[_kind(name)], label=label, linewidth=1)


def _growth(axis: Any, samples: Sequence[Sample]) -> None:
    """The levels that are judged, against the first of them."""
    last = samples[-1]["done"]
    middles = [(place + 0.5) * last / TENTHS / 1e3 for place in range(1, TENTHS)]
    named: set[str] = set()
    for name, its in levels(samples, last).items():
        kind = _kind(name)
        label = None if kind in named else kind
        named.add(kind)
        percent = [100 * (level / its[0] - 1) for level in its]
        axis.plot(middles, percent, "o-", color=COLORS[kind], markersize=3, label=label)
    axis.axhline(MOST, color="black", linestyle="--", linewidth=1, label="bound")
    axis.set_title("growth of each tenth's median, %")


def _pages(axis: Any, places: list[float], samples: Sequence[Sample]) -> None:
    free, cached, used = [], [], []
    for sample in samples:
        engines = [one for name, one in sample["stages"].items() if name.startswith("engine")]
        total, empty, kept = (
            sum(one[name] for one in engines)
            for name in ("pages_total", "pages_free", "pages_evictable")
        )
        free.append(empty)
        cached.append(kept)
        used.append(total - empty - kept)
    axis.stackplot(
        places, used, cached, free, labels=("in use", "cached", "free"),
        colors=("tab:red", "tab:cyan", "whitesmoke"),
    )  # fmt: skip
    axis.set_title("KV pages of all engines")


def _requests(axis: Any, places: list[float], samples: Sequence[Sample]) -> None:
    wanted = (
        ("gateway", "waiting", "no output yet (gateway)"),
        ("gateway", "running", "with output (gateway)"),
        ("engine", "slots_used", "slots taken"),
        ("scheduler", "waiting", "waiting for a slot"),
    )
    for kind, stat, label in wanted:
        many = [
            sum(one[stat] for name, one in sample["stages"].items() if _kind(name) == kind)
            for sample in samples
        ]
        axis.plot(places, many, label=label, linewidth=1)
    axis.set_title("requests")

"""Latency against the rate of arrivals, as a picture.

Knows the points that `online` measured; matplotlib is needed only here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = {"ttft_ms": "time to first token, ms", "itl_ms": "time between tokens, ms"}


def latencies(path: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Writes a picture (the kind follows from the name's end): p50, p90 and p99 at each rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(10, 4), constrained_layout=True)
    rates = [point["rate"] or 0.0 for point in points]
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for which in ("p50", "p90", "p99"):
            axis.plot(rates, [point[name].get(which) for point in points], "o-", label=which)
        axis.set_xlabel("requests per second")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.savefig(path)
    pyplot.close(figure)

"""`compare A.json B.json`: every number of two result files side by side, and their ratio.

Knows the result file's form, not what its numbers mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.command_line import read_report
from pipeinfer.bench.report import SCHEMA
from pipeinfer.settings import ConfigurationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Prints the table; the metrics are the ratios after / before."""
    if settings:
        raise ConfigurationError("compare takes two files and nothing else")
    before, after = (read_report(path, SCHEMA) for path in (options.before, options.after))
    for name in ("command", "hardware", "commit", "date"):
        if before[name] == after[name]:
            print(f"{name}: {before[name]}")
        else:
            print(f"{name} differs: {before[name]} | {after[name]}")
    old, new = dict(numbers(before["metrics"])), dict(numbers(after["metrics"]))
    ratios = {name: new[name] / old[name] for name in old if name in new and old[name]}
    width = max((len(name) for name in old | new), default=0) + 2
    print(f"{'':{width}}{'before':>14}{'after':>14}{'ratio':>8}")
    for name in old | new:
        shown = [f"{side[name]:14.4g}" if name in side else f"{'-':>14}" for side in (old, new)]
        ratio = f"{ratios[name]:8.3f}" if name in ratios else ""
        print(f"{name:{width}}{shown[0]}{shown[1]}{ratio}")
    return ratios


def numbers(metrics: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, value) of every number in nested objects and lists."""
    if isinstance(metrics, bool):
        return
    if isinstance(metrics, (int, float)):
        yield path, float(metrics)
        return
    items: Any = ()
    if isinstance(metrics, dict):
        items = metrics.items()
    elif isinstance(metrics, list):
        items = enumerate(metrics)
    for name, value in items:
        yield from numbers(value, f"{path}.{name}" if path else str(name))

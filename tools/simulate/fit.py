"""`fit`: a step-time model from the recordings that a real run left with `--record DIR`.

Knows files; what a step took is read by fitting.py, the coefficients are found by fitting.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeinfer.settings import ConfigurationError
from simulate import delays, fitting, step_model
from simulate.fitting import MeasuredStep

FEWEST = 50  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="DIR", help="what --record wrote")
    add("--out", type=Path, metavar="MODEL.json", required=True)
    add("--skip", type=int, default=20, metavar="N", help="first steps of each engine left out")
    add("--source", default="", help="a remark on where it comes from")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the model; returns and prints how well it fits. Raises ConfigurationError."""
    runs = [fitting.recordings(folder) for folder in options.folders]
    engines = [one for run in runs for one in run if fitting.leads(one)]
    parts = [list(fitting.steps(engine))[options.skip :] for engine in engines]
    steps = [step for part in parts for step in part]
    if len(steps) < FEWEST:
        raise ConfigurationError(f"{len(steps)} steps are too few for a model, {FEWEST} is least")
    model = fitting.fit(steps)
    outbound_row, outbound = delays.by_row(map(delays.outbound, runs))
    model = msgspec.structs.replace(
        model,
        noise=fitting.noise(
            [np.array([step.seconds for step in part]) for part in parts],
            [fitting.predicted(model, part) for part in parts],
            [np.array([step.tokens > 0 for step in part]) for part in parts],
        ),
        turnaround=delays.quantiles(map(delays.turnaround, engines)),
        bubble=delays.quantiles(map(delays.bubble, engines)),
        inbound=delays.quantiles(map(delays.inbound, runs)),
        outbound=outbound,
        outbound_row=outbound_row,
        source=options.source,
    )
    step_model.save(options.out, model)
    return _quality(model, steps)


def _quality(model: step_model.StepModel, steps: list[MeasuredStep]) -> dict[str, Any]:
    seconds, said = np.array([s.seconds for s in steps]), fitting.predicted(model, steps)
    errors = np.abs(said - seconds) / seconds
    quality = {
        "steps": len(steps),
        "measured_seconds": float(seconds.sum()),
        "model_seconds": float(said.sum()),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
    }
    print(
        f"{len(steps):,} steps of {quality['measured_seconds']:.2f} s, by the model "
        f"{quality['model_seconds']:.2f} s; a step is off by {quality['median_error']:.1%} (median)"
        f", {quality['p90_error']:.1%} (p90)"
    )
    return quality

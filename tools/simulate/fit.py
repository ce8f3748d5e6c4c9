"""`fit`: a step-time model from the recordings that a real run left with `--record DIR`.

Knows files; what a step took is read by measured.py, the coefficients are found by fitting.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeinfer.settings import ConfigurationError
from simulate import fitting, measured, step_model
from simulate.measured import MeasuredStep

FEWEST = 50  # steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what --record wrote")
    add("--out", type=Path, metavar="MODEL.json", required=True)
    add("--skip", type=int, default=20, metavar="N", help="first steps of each engine left out")
    add("--source", default="", help="a remark on where it comes from")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Writes the model; returns and prints how well it fits. Raises ConfigurationError."""
    found = measured.recordings(options.folder)
    engines = [one for one in found if one.identity.name == "engine" and not one.identity.rank]
    steps: list[MeasuredStep] = []
    for engine in engines:
        steps += list(measured.steps(engine))[options.skip :]
    if len(steps) < FEWEST:
        raise ConfigurationError(f"{len(steps)} steps are too few for a model, {FEWEST} is least")
    model = fitting.fit(steps)
    model = msgspec.structs.replace(
        model,
        jitter=fitting.jitter(model, steps),
        turnaround=float(np.median([measured.turnaround(engine) for engine in engines])),
        delivery=measured.delivery(found),
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

"""`fit`: a step-time model from the recordings that a real run left with `--record DIR`: times of
steps, their scatter, and the delays between stages.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from pipeinfer.settings import ConfigurationError
from simulate import recordings, step_model
from simulate.recordings import MeasuredStep
from simulate.step_model import Noise, Scatter, StepModel

DECODE_FROM = (0, 16, 64, 128)  # rows from which each further row may cost more
PREFILL_FROM = (0, 128, 512)
TOLERANCE = 1e-12
ROUNDS = 10  # of weighting: far more than it takes


def fit(steps: Sequence[MeasuredStep]) -> StepModel:
    """The model that is closest to `steps` in the square, each weighted by one over its seconds.

    So short steps count as well as long ones, and yet the sum over all steps comes out right:
    iteratively reweighted least squares with a variance that grows with the mean (Wedderburn,
    Quasi-likelihood functions, Biometrika 1974), without negative coefficients.
    """
    table = np.array([(s.decodes, s.contexts, s.tokens, s.pairs) for s in steps], float)
    seconds = np.array([s.seconds for s in steps])
    decodes, contexts, tokens, pairs = table.T
    columns = [np.ones(len(steps)), (tokens > 0).astype(float), contexts, pairs]
    columns += [np.maximum(decodes - start, 0.0) for start in DECODE_FROM]
    columns += [np.maximum(tokens - start, 0.0) for start in PREFILL_FROM]
    found = _weighted(np.stack(columns, axis=1), seconds).tolist()
    many = 4 + len(DECODE_FROM)
    model = StepModel(
        fixed=found[0],
        mixed=found[1],
        context=found[2],
        pair=found[3],
        decode=_pieces(DECODE_FROM, found[4:many]),
        prefill=_pieces(PREFILL_FROM, found[many:]),
    )
    return model


def _weighted(matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    said = np.full(len(seconds), seconds.mean())
    found = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        root = 1.0 / np.sqrt(np.maximum(said, seconds.mean() * 1e-3))
        found = nonnegative(matrix * root[:, None], seconds * root)
        said = matrix @ found
    return found


def predicted(model: StepModel, steps: Sequence[MeasuredStep]) -> np.ndarray:
    """Seconds of each step by the model, without noise, float64 [n]."""
    return np.array([model.seconds(s.decodes, s.contexts, s.tokens, s.pairs) for s in steps])


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |matrix x - target|; Lawson and Hanson, Solving Least Squares Problems
    (1974), algorithm NNLS. `matrix` [n, k], `target` [n]; columns are scaled to be alike."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    count = a.shape[1]
    x, free = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        slope = a.T @ (target - a @ x)
        slope[free] = -np.inf
        if slope.max() <= TOLERANCE:
            break
        free[int(slope.argmax())] = True
        while True:
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            negative = free & (wanted <= 0)
            if not negative.any():
                x = wanted
                break
            step = (x[negative] / (x[negative] - wanted[negative])).min()
            x += step * (wanted - x)
            free &= x > TOLERANCE
            x[~free] = 0.0
    return x / scale


def by_row(parts: Iterable[Sequence[tuple[int, float]]]) -> tuple[float, tuple[float, ...]]:
    """(seconds for each row, quantiles of what is left without them) of (rows, seconds)."""
    every = np.array([one for part in parts for one in part]).reshape(-1, 2)
    rows, seconds = every.T
    line = np.stack([np.ones(len(every)), rows], axis=1)
    rate = float(nonnegative(line, seconds)[1]) if len(every) else 0.0
    return rate, recordings.quantiles([np.maximum(seconds - rate * rows, 0.0).tolist()])


def _pieces(starts: Sequence[int], rates: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((start, rate) for start, rate in zip(starts, rates, strict=True) if rate > 0)


SIZES = 4  # classes of steps by their modelled seconds, as many steps in each
MIN_CLASS_STEPS = 100
LEAST = 30  # steps with prompts, or without: fewer scatter as all steps do
QUANTILES = 100  # of the factors of a class
LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # steps between those that are compared
LASTING = tuple(2.0 ** (power / 2) for power in range(15))  # steps, 1 to 128


def noise(
    seconds: Sequence[np.ndarray], said: Sequence[np.ndarray], mixed: Sequence[np.ndarray]
) -> Noise:
    """Of engines whose steps took `seconds` float64 [n], by a model take `said` float64 [n] and had
    prompt tokens where `mixed` bool [n], an array of each for each engine, in the steps' order."""
    took, model, prompts = (np.concatenate(one) for one in (seconds, said, mixed))
    scores = np.empty(len(took))
    kinds: list[tuple[Scatter, ...]] = []
    for kind in (~prompts, prompts):
        chosen = kind if kind.sum() >= LEAST else np.ones(len(took), bool)
        scatter, found = _scatter(took[chosen], model[chosen])
        scores[chosen] = found
        kinds.append(scatter)
    ends = np.cumsum([len(one) for one in seconds])[:-1]
    persistent, lasting = _persistence(np.split(scores, ends))
    return Noise(scatter=kinds[0], mixed=kinds[1], persistent=persistent, lasting=lasting)


def _scatter(took: np.ndarray, model: np.ndarray) -> tuple[tuple[Scatter, ...], np.ndarray]:
    """The classes of such steps, and each step's place in its own, as a normal variable."""
    sizes = max(1, min(SIZES, len(took) // MIN_CLASS_STEPS))
    above = np.unique(np.quantile(model, np.arange(sizes) / sizes))
    above[0] = 0.0
    of = np.searchsorted(above, model, side="right") - 1
    scatter: list[Scatter] = []
    scores = np.empty(len(took))
    for size, least in enumerate(above.tolist()):
        scatter.append(Scatter(least, _factors(took[of == size], model[of == size])))
        scores[of == size] = _scores((took / model)[of == size])
    return tuple(scatter), scores


def _factors(took: np.ndarray, said: np.ndarray) -> tuple[float, ...]:
    """Quantiles of took over said whose mean keeps the sum over all steps."""
    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    factors = np.quantile(took / said, middles)
    factors *= took.sum() / said.sum() / factors.mean()
    return tuple(factors.round(4).tolist())


def _scores(ratios: np.ndarray) -> np.ndarray:
    """The places of `ratios` among each other as those of a standard normal variable."""
    normal = NormalDist()
    places = np.empty(len(ratios))
    places[np.argsort(ratios, kind="stable")] = (np.arange(len(ratios)) + 0.5) / len(ratios)
    return np.array([normal.inv_cdf(place) for place in places])


def _persistence(engines: Sequence[np.ndarray]) -> tuple[float, float]:
    """(share, steps) for which share * exp(-lag / steps) is closest to the autocorrelation."""
    lags = [lag for lag in LAGS if sum(len(one) > lag for one in engines)]
    found = np.array([_correlation(engines, lag) for lag in lags])
    best = (np.inf, 0.0, 1.0)
    for lasting in LASTING:
        fading = np.exp(-np.array(lags) / lasting)
        share = float(np.clip(found @ fading / (fading @ fading), 0.0, 1.0))
        error = float(np.square(found - share * fading).sum())
        best = min(best, (error, share, lasting))
    return round(best[1], 4), round(best[2], 2)


def _correlation(engines: Sequence[np.ndarray], lag: int) -> float:
    """Mean product of scores that are `lag` steps apart, in the same engine."""
    products = [one[lag:] * one[:-lag] for one in engines if len(one) > lag]
    return float(np.concatenate(products).mean())


MIN_STEPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="DIR", help="what --record wrote")
    add("--out", type=Path, metavar="MODEL.json", required=True)
    add("--skip", type=int, default=20, metavar="N", help="first steps of each engine left out")
    add("--source", default="", help="a remark on where it comes from")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the model; returns and prints how well it fits. Raises ConfigurationError."""
    runs = [recordings.recordings(folder) for folder in options.folders]
    engines = [one for run in runs for one in run if recordings.leads(one)]
    parts = [list(recordings.steps(engine))[options.skip :] for engine in engines]
    steps = [step for part in parts for step in part]
    if len(steps) < MIN_STEPS:
        raise ConfigurationError(
            f"{len(steps)} steps are too few for a model, {MIN_STEPS} is least"
        )
    model = fit(steps)
    outbound_row, outbound = by_row(map(recordings.outbound, runs))
    model = msgspec.structs.replace(
        model,
        noise=noise(
            [np.array([step.seconds for step in part]) for part in parts],
            [predicted(model, part) for part in parts],
            [np.array([step.tokens > 0 for step in part]) for part in parts],
        ),
        turnaround=recordings.quantiles(map(recordings.turnaround, engines)),
        bubble=recordings.quantiles(map(recordings.bubble, engines)),
        inbound=recordings.quantiles(map(recordings.inbound, runs)),
        outbound=outbound,
        outbound_row=outbound_row,
        source=options.source,
    )
    step_model.save(options.out, model)
    return _quality(model, steps)


def _quality(model: step_model.StepModel, steps: list[MeasuredStep]) -> dict[str, Any]:
    seconds, said = np.array([s.seconds for s in steps]), predicted(model, steps)
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

"""Finds how steps scatter around a model: factors by size, and how long they stay alike.

Knows measured and modelled seconds as numbers; reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from simulate.noise import Noise, Scatter

SIZES = 4  # classes of steps by their modelled seconds, as many steps in each
FEWEST = 100  # steps in a class
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
    sizes = max(1, min(SIZES, len(took) // FEWEST))
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

"""Finds the coefficients of a step-time model: least squares without negative coefficients.

Knows measured steps as numbers; reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulate.measured import MeasuredStep
from simulate.step_model import StepModel

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


def _pieces(starts: Sequence[int], rates: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((start, rate) for start, rate in zip(starts, rates, strict=True) if rate > 0)

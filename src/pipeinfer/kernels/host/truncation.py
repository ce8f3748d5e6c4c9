"""Which candidates top-k, top-p and min-p leave, as one threshold for each row.

Knows logits and three numbers a row; no noise, no request. Equal logits stand or fall together, so
that neither ids nor a sort's order decide; a threshold depends on its own row only.
"""

from __future__ import annotations

from math import inf

import numpy as np

SORTED_WIDTHS = (512, 4096)  # candidates looked at before a top-p row sorts its whole vocabulary


def truncation_thresholds(
    x: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray
) -> np.ndarray:
    """float32 [F, 1]: row r keeps the candidates with x >= the threshold; the maximum always stays.

    x: float32 [F, vocab], logits after temperature, shifted so that each row's maximum is 0.
    top_k int32 (0 is off) applies first; top_p float32 (1 is off) to what is left of the
    probability, renormalised; min_p float32 (0 is off) is relative to the largest probability.
    """
    with np.errstate(divide="ignore"):
        floor = np.log(min_p.astype(np.float32))[:, None]
    by_k = (top_k > 0) & (top_k < x.shape[1])
    by_p = top_p < 1
    ranked = np.flatnonzero(by_k | by_p)
    if len(ranked):
        top_k = np.where(by_k, top_k, 0)[ranked, None]
        top_p = np.where(by_p, top_p, np.inf)[ranked, None]
        floor[ranked] = np.maximum(floor[ranked], _ranked(x[ranked], top_k, top_p))
    return floor


def _ranked(x: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """The thresholds of top_k (0 is off), then top_p (infinity is off), all [F, 1].

    Looks at the best few values, and at more of them for rows where the few do not reach top_p.
    """
    result = np.empty((len(x), 1), dtype=np.float32)
    todo = np.arange(len(x))
    first = int(top_k.max()) if top_k.all() else max(int(top_k.max()), SORTED_WIDTHS[0])
    for width in (first, *(wide for wide in (*SORTED_WIDTHS, x.shape[1]) if wide > first)):
        values = _largest(x[todo], width)
        kth = np.take_along_axis(values, np.maximum(top_k[todo], 1) - 1, axis=-1)
        kth[top_k[todo] == 0] = -np.inf
        result[todo] = np.maximum(kth, _nucleus(x[todo], values, kth, top_p[todo]))
        # A row is settled when its threshold lies above the smallest value that was looked at.
        unsettled = (result[todo] <= values[:, -1:]) & (top_k[todo] == 0)
        todo = todo[unsettled[:, 0]]
        if len(todo) == 0 or width >= x.shape[1]:
            break
    return result


def _nucleus(x: np.ndarray, values: np.ndarray, kth: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """The smallest of `values` (falling) needed to reach top_p of the weight of all x >= kth."""
    if not np.isfinite(top_p).any():
        return np.full_like(kth, -np.inf)
    weights = np.exp(x)
    weights[x < kth] = 0
    need = weights.sum(axis=-1, dtype=np.float64)[:, None] * top_p
    weights = np.exp(values).astype(np.float64)
    weights[values < kth] = 0
    before = np.cumsum(weights, axis=-1) - weights
    inside = ((before < need) & (weights > 0)).sum(axis=-1)
    inside = np.maximum(inside, 1)  # a top_p that is 0 in float32 needs none; the best one stays
    limit = np.take_along_axis(values, inside[:, None] - 1, axis=-1)
    return np.where(np.isfinite(top_p), limit, -np.inf).astype(np.float32)


def _largest(x: np.ndarray, width: int) -> np.ndarray:
    """The `width` largest values of each row, falling, [F, min(width, vocab)]."""
    width = min(width, x.shape[1])
    if width < x.shape[1]:
        x = np.partition(x, x.shape[1] - width, axis=-1)[:, x.shape[1] - width :]
    return np.ascontiguousarray(np.sort(x, axis=-1)[:, ::-1])


def is_truncated(
    top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray, vocab: float = inf
) -> np.ndarray:
    """bool [S]: which rows leave out some of `vocab` ids, if they are random; where it does not say
    how many there are, any top-k may."""
    return (top_k > 0) & (top_k < vocab) | (top_p < 1) | (min_p > 0)

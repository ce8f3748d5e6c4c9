"""Quantiles of the last minute lie in the bucket where numpy's lie, and what is older is gone."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.gateway.metrics import WINDOW, RollingHistogram

BOUNDS = (0.01, 0.1, 1.0, 10.0)
INF = float("inf")
seconds = st.floats(0.0001, 9.9)


def totals(values: list[float]) -> list[float]:
    """As a histogram counts: how many were at most each bound, and all."""
    return [float(sum(v <= bound for v in values)) for bound in (*BOUNDS, INF)]


@given(st.lists(seconds, min_size=1, max_size=50), st.sampled_from((0.5, 0.9, 0.99)))
def test_a_quantile_lies_in_the_right_bucket(values: list[float], share: float) -> None:
    lately = RollingHistogram(BOUNDS)
    lately.update(totals([]), 0.0)
    lately.update(totals(values), 1.0)
    found = lately.quantile(share)
    true = float(np.quantile(values, share, method="inverted_cdf"))
    assert found is not None
    assert bisect_left(BOUNDS, found) == bisect_left(BOUNDS, true)
    assert lately.count == len(values)


@given(st.lists(seconds, max_size=20), st.lists(seconds, min_size=1, max_size=20))
def test_what_is_older_than_the_window_is_gone(old: list[float], new: list[float]) -> None:
    lately, fresh = RollingHistogram(BOUNDS), RollingHistogram(BOUNDS)
    lately.update(totals([]), 0.0)
    lately.update(totals(old), 10.0)
    lately.update(totals(old), 10.0 + WINDOW)
    assert lately.count == 0 and lately.quantile(0.5) is None
    lately.update(totals(old + new), 11.0 + WINDOW)
    fresh.update(totals([]), 0.0)
    fresh.update(totals(new), 1.0)
    assert lately.count == len(new)
    assert lately.quantile(0.5) == fresh.quantile(0.5)


def test_beyond_the_last_bound_nothing_is_known_but_the_bound() -> None:
    lately = RollingHistogram(BOUNDS)
    lately.update(totals([]), 0.0)
    lately.update(totals([50.0]), 1.0)
    assert lately.quantile(0.5) == BOUNDS[-1]

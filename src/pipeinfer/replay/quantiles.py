"""Quantiles of a handful of numbers, as the tables show them.

Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(0, min(len(ordered) - 1, -(-int(share * len(ordered) * 1e9) // 10**9) - 1))
    return ordered[rank]


def milliseconds(values: Sequence[float]) -> str:
    """`p50 0.21  p99 1.40  max 3.10 ms` of seconds, or a dash."""
    if not values:
        return "-"
    p50, p99, most = (1e3 * v for v in (quantile(values, 0.5), quantile(values, 0.99), max(values)))
    return f"p50 {p50:.2f}  p99 {p99:.2f}  max {most:.2f} ms"

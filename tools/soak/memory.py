"""Whether the memory of a server's processes stays flat, from samples of it.

A process has its working size after the first tenth of the requests; then caches, KV pages and
flight recorders are filled. The rest is cut into nine tenths, whose level is the median of their
samples: a body of 5 MB, or a copy forked for a moment, is no growth. No level may be more than 5 %
above the first of the nine, so what grows late, or grows and shrinks again, counts as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

TENTHS = 10
MOST = 5.0  # percent
FEWEST = 3  # samples of a tenth
MIB = 2**20

Sample = Mapping[str, Any]


def levels(samples: Sequence[Sample], requests: int) -> dict[str, list[float]]:
    """For each process that is in every sample after the first tenth: the median of its own
    bytes in each tenth but the first. `requests`: of the whole run. ValueError if a tenth has fewer
    than FEWEST samples."""
    tenths: list[list[Sample]] = [[] for _ in range(TENTHS)]
    for sample in samples:
        place = min(int(sample["done"] * TENTHS / requests), TENTHS - 1)
        tenths[place].append(sample["processes"])
    late = tenths[1:]
    fewest = min(map(len, late))
    if fewest < FEWEST:
        raise ValueError(f"a tenth of the requests has {fewest} samples, not {FEWEST} or more")
    names = set.intersection(*(set(one) for tenth in late for one in tenth))
    return {
        name: [median(one[name]["own"] for one in tenth) for tenth in late]
        for name in sorted(names)
    }


def judged(
    samples: Sequence[Sample], requests: int, most: float = MOST
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """(for each process: MiB of the first level, of the last, of the highest, and of the greatest
    sample after the first tenth; percent by which the highest and the last level exceed the first;
    what grew by more than `most` percent)."""
    found: dict[str, dict[str, float]] = {}
    broken: list[str] = []
    try:
        by_name = levels(samples, requests)
    except ValueError as error:
        return found, [f"memory: {error}"]
    for name, its in by_name.items():
        first, highest = its[0], max(its)
        late = [one for one in samples if one["done"] * TENTHS >= requests]
        grown = 100 * (highest / first - 1)
        found[name] = {
            "first_mib": round(first / MIB, 2),
            "last_mib": round(its[-1] / MIB, 2),
            "highest_mib": round(highest / MIB, 2),
            "greatest_sample_mib": round(
                max(one["processes"][name]["own"] for one in late) / MIB, 2
            ),
            "highest_percent": round(grown, 2),
            "last_percent": round(100 * (its[-1] / first - 1), 2),
        }
        if grown > most:
            broken.append(
                f"memory of {name} grew by {grown:.1f} %: {first / MIB:.1f} MiB after a tenth of "
                f"the requests, then {highest / MIB:.1f} MiB"
            )
    return found, broken

"""Whether the memory of a server's processes stays flat, from samples of it.

A process has its working size after the first tenth of the requests; then caches, KV pages and
flight recorders are filled. The samples of the rest are cut into nine parts, in the order of time,
whose level is their median: a body of 5 MB, or a copy forked for a moment, is no growth. No level
may be more than 5 % above the first, so what grows late, or grows and shrinks again, counts too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

TENTHS = 10
MOST = 5.0  # percent
PARTS = TENTHS - 1
FEWEST = 3  # samples of a part
MIB = 2**20

Sample = Mapping[str, Any]


def levels(samples: Sequence[Sample], requests: int) -> dict[str, list[float]]:
    """For each process that is in every sample after the first tenth of the `requests`: the median
    of its own bytes in each part. ValueError if a part has fewer than FEWEST samples."""
    late = [one["processes"] for one in samples if one["done"] * TENTHS >= requests]
    if len(late) < PARTS * FEWEST:
        raise ValueError(f"{len(late)} samples after a tenth of the requests are too few")
    cuts = [len(late) * part // PARTS for part in range(PARTS + 1)]
    names = set.intersection(*map(set, late))
    return {
        name: [
            median(one[name]["own"] for one in late[begin:end])
            for begin, end in itertools.pairwise(cuts)
        ]
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

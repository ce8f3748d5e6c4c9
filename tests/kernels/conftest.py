"""In Triton's interpreter, tests with three dimensions or more meet every pair of their values.

A GPU computes all cases in seconds, the interpreter takes a second for some.
"""

from __future__ import annotations

import itertools
import os


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    kept, left = [], {item: _pairs(item) for item in items}
    for _, of_one in itertools.groupby(items, lambda item: item.function):
        cases = [item for item in of_one if left[item]]
        while cases:
            best = max(cases, key=lambda case: len(left[case]))  # the first of the best
            met = set(left[best])
            kept.append(best)
            for case in cases:
                left[case] -= met
            cases = [case for case in cases if left[case]]
    pairless = [item for item in items if not _pairs(item)]
    chosen = {*kept, *pairless}
    items[:] = [item for item in items if item in chosen]


def _pairs(item) -> set[tuple]:
    """Of the values of a case, which are one object in all cases that have them."""
    params = item.callspec.params.items() if hasattr(item, "callspec") else ()
    return set(itertools.combinations([(name, id(value)) for name, value in params], 2))

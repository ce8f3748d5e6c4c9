"""Of the cases of a test, as few as have every pair of the values that it crosses, or every one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def covering(cases: Sequence[Mapping[str, Any]], together: int = 2) -> list[int]:
    """Indices into `cases`, each the values of a case by name. A value that several cases have is
    one object in all of them, as pytest hands it out. together: 2 for pairs, 1 for each value."""
    named = [[(name, id(value)) for name, value in case.items()] for case in cases]
    left = [set(itertools.combinations(values, together)) for values in named]
    chosen = [at for at, pairs in enumerate(left) if not pairs]  # of one value, or none
    while any(left):
        best = max(range(len(left)), key=lambda at: len(left[at]))  # the first of the best
        chosen.append(best)
        met = set(left[best])
        for pairs in left:
            pairs -= met
    return sorted(chosen)

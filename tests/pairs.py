"""Of the cases of a test, as few as have every pair of the values that it crosses."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def covering(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices into `cases`, each the values of a case by name. A value that several cases have is
    one object in all of them, as pytest hands it out."""
    left = [set(itertools.combinations(((n, id(v)) for n, v in case.items()), 2)) for case in cases]
    chosen = [at for at, pairs in enumerate(left) if not pairs]  # of one value, or none
    while any(left):
        best = max(range(len(left)), key=lambda at: len(left[at]))  # the first of the best
        chosen.append(best)
        met = set(left[best])
        for pairs in left:
            pairs -= met
    return sorted(chosen)

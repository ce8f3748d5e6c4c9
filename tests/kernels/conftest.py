"""In Triton's interpreter, tests of several dimensions meet every value of each.

A GPU computes all cases in seconds, the interpreter takes a second for some.
"""

from __future__ import annotations

import itertools
import os

from pairs import covering


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    kept = []
    for _, of_one in itertools.groupby(items, lambda item: item.function):
        cases = list(of_one)
        params = [item.callspec.params if hasattr(item, "callspec") else {} for item in cases]
        kept += [cases[at] for at in covering(params, together=1)]
    items[:] = kept

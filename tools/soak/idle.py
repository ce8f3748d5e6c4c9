"""Whether an idle server holds what it held when it was idle before: processes, files, threads.

And whether its pages are free or only cached, and its slots free. Knows samples of watching.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Sample = Mapping[str, Any]


def changed(before: Sample, after: Sample) -> list[str]:
    """What is another number now, or another process."""
    broken: list[str] = []
    was, now = before["processes"], after["processes"]
    if set(was) != set(now):
        broken.append(f"processes {sorted(now)}, before {sorted(was)}")
    for name in sorted(set(was) & set(now)):
        broken += [
            f"{what} of {name}: {now[name][what]}, before {was[name][what]}"
            for what in ("pid", "descriptors", "threads")
            if now[name][what] != was[name][what]
        ]
    return broken


def in_use(sample: Sample) -> list[str]:
    """Pages and slots that are not given back."""
    broken: list[str] = []
    for stage, stats in sample["stages"].items():
        if not stage.startswith("engine"):
            continue
        pages = stats["pages_total"] - stats["pages_free"] - stats["pages_evictable"]
        for what, many in (("pages", pages), ("slots", stats["slots_used"])):
            if many:
                broken.append(f"{many:g} {what} of {stage} are in use")
    return broken

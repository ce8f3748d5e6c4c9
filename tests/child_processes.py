"""Processes that a test, or its server, has started."""

from __future__ import annotations

from contextlib import suppress

import psutil


def children_with(word: str, pid: int | None = None) -> list[psutil.Process]:
    """Running children of process `pid`, or of this one, with that word on their command line, the
    oldest first. A child that ends meanwhile may be missing; it is no error."""
    found = list[tuple[float, psutil.Process]]()
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # which a zombie's command line raises too
            if word in child.cmdline():
                found.append((child.create_time(), child))
    return [child for _, child in sorted(found, key=lambda one: one[0])]

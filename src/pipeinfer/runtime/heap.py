"""How the C library keeps a process's memory: large pieces apart from small ones.

Knows glibc. With another library nothing is changed.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
LARGE = 128 << 10  # bytes, glibc's own first value


def map_large_allocations() -> None:
    """From now on each piece of LARGE bytes or more is mapped for itself, and unmapped when it is
    free.

    Left alone, glibc does so only until the first such piece is free, and then puts all that are no
    larger, up to 32 MiB, among the small ones. The holes that they leave are rarely given back: a
    process that runs for days grows by them. A piece that is mapped costs its page faults each time
    it is made; so this is for processes that seldom make one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE)

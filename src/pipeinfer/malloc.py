"""What is asked of the C library's memory, where the library is glibc, elsewhere nothing; and how
much memory this process has."""

from __future__ import annotations

import ctypes
import linecache
import os
from pathlib import Path

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
LARGE = 128 << 10  # bytes; glibc's own first value


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


def return_freed_memory() -> None:
    """Gives the kernel the memory that was freed, which the library otherwise keeps for later.
    Source lines that Python read for imports are freed.
    """
    linecache.clearcache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """What is in memory of this process, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

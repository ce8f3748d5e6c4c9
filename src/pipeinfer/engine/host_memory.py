"""Memory of the host: how much this process may still take, and what it gives back.

Knows Linux' files and nothing of what the memory is for.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping, within the control group's limit if it has one."""
    free = _meminfo(root / "proc/meminfo")
    cgroup = root / "sys/fs/cgroup"
    limit = _number(cgroup / "memory.max")
    used = _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(limit - used, 0))
    return free


def return_freed_memory() -> None:
    """Has the C library give the kernel the memory that was freed, which it otherwise keeps for
    later. Does nothing where the library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _meminfo(path: Path) -> int:
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    """The number in `path`; None without the file, or where it says "max"."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None

"""What the control group of this process, or of its container, lets it have of the host.

Version 2 has one tree, version 1 a tree for each resource, under the same folder. Knows no stage.
"""

from __future__ import annotations

from pathlib import Path

GROUPS = Path("sys/fs/cgroup")


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Whole cores of which the group may use the time; None: there is no quota."""
    groups = root / GROUPS
    if (groups / "cpu.max").exists():
        quota_us, _, period_us = (groups / "cpu.max").read_text().partition(" ")
        quota, period = _decimal(quota_us), _decimal(period_us)
    else:
        quota = _number(groups / "cpu/cpu.cfs_quota_us")
        period = _number(groups / "cpu/cpu.cfs_period_us")
    return None if quota is None or not period else quota // period


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that the group may still take; None: there is no limit."""
    groups = root / GROUPS
    limit, used = _number(groups / "memory.max"), _number(groups / "memory.current")
    if used is None:
        # Without a limit version 1 says the greatest number of pages, which is far above any host.
        limit = _number(groups / "memory/memory.limit_in_bytes")
        used = _number(groups / "memory/memory.usage_in_bytes")
    return None if limit is None or used is None else max(limit - used, 0)


def _number(path: Path) -> int | None:
    """None if there is no such file, or if it says that there is no limit."""
    return _decimal(path.read_text()) if path.exists() else None


def _decimal(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None

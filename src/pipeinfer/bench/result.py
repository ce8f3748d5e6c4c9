"""The file of a result: what was run, where and when, and its metrics.

Knows nothing of what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path

SCHEMA = "pipeinfer-bench/1"


def write_result(
    path: Path, command: str, metrics: Mapping[str, object], commit: str = "", schema: str = SCHEMA
) -> None:
    """Writes the result of `command` as JSON."""
    result = {
        "schema": schema,
        "command": command,
        "commit": commit,
        "hardware": hardware(),
        "date": date.today().isoformat(),
        "metrics": metrics,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def hardware() -> dict[str, object]:
    """Processor, cores that this process may use, memory in GiB, and GPUs by name."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = command_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return {
        "cpu": _processor(),
        "cores": cores(),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": gpus,
    }


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def command_output(*command: str) -> str:
    """What a command prints; "" where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    for line in listed.read_text().splitlines() if listed.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

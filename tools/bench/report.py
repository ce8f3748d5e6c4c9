"""The result file of a benchmark: what was run, on what, when, and the numbers.

Knows no measurement; `metrics` is whatever the command measured.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

SCHEMA = "pipeinfer-bench/1"
ROOT = Path(__file__).resolve().parents[2]


def write(
    path: Path,
    arguments: Sequence[str],
    metrics: dict[str, Any],
    tool: str = "tools/bench",
    schema: str = SCHEMA,
) -> None:
    """Writes the result of `python tool *arguments*` as JSON."""
    result = {
        "schema": schema,
        "command": shlex.join(["python", tool, *arguments]),
        "commit": commit(),
        "hardware": hardware(),
        "date": date.today().isoformat(),
        "metrics": metrics,
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def read(path: Path) -> dict[str, Any]:
    """A result file; ValueError if it is none."""
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no result of schema {SCHEMA}")
    return result


def commit() -> str:
    """The checkout's commit, with "+changes" if files differ from it; "" outside a checkout."""
    name = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    return name + ("+changes" if name and changes else "")


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, and GPUs by name."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": gpus,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    """What a command prints; "" where there is no such command or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""

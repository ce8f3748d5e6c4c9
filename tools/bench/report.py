"""The result file of a benchmark, with the commit of the checkout that it measured.

Knows no measurement; `metrics` is whatever the command measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeinfer.bench.report import SCHEMA, command_output, write_result

ROOT = Path(__file__).resolve().parents[2]


def write(
    path: Path,
    arguments: Sequence[str],
    metrics: dict[str, Any],
    tool: str = "tools/bench",
    schema: str = SCHEMA,
) -> None:
    """Writes the result of `python tool *arguments*` as JSON."""
    write_result(path, shlex.join(["python", tool, *arguments]), metrics, commit(), schema)


def read(path: Path) -> dict[str, Any]:
    """A result file; ValueError if it is none."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no result of schema {SCHEMA}")
    return found


def commit() -> str:
    """The checkout's commit, with "+changes" if files differ from it; "" outside a checkout."""
    name = command_output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changes = command_output("git", "-C", str(ROOT), "status", "--porcelain", "-uno")
    return name + ("+changes" if name and changes else "")

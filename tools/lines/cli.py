"""The command line: lines of code of a checkout's src/ or of another folder, in total and per room.

A room is a folder of the package; what lies beside them is counted as ".".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import report
from lines.counting import code_lines

SCHEMA = "pipeinfer-lines/1"
ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    made = argparse.ArgumentParser(prog="python tools/lines", description=__doc__)
    said = "another checkout, or a folder of Python that has no src"
    made.add_argument("checkout", type=Path, nargs="?", default=ROOT, help=said)
    made.add_argument("--json", type=Path, metavar="OUT", help="write the result there")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 where there is nothing to count."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    inner = options.checkout / "src"
    source = inner if inner.is_dir() else options.checkout
    metrics = count(source)
    if not metrics["files"]:
        print(f"no Python files in {source}", file=sys.stderr)
        return 2
    print(json.dumps(metrics))
    if options.json is not None:
        report.write(options.json, words, metrics, "tools/lines", SCHEMA)
    return 0


def count(source: Path) -> dict:
    """ "total", "files", and "rooms", the largest first, of all packages in `source`."""
    rooms: dict[str, int] = {}
    files = sorted(source.rglob("*.py"))
    for file in files:
        parts = file.relative_to(source).parts
        room = parts[1] if len(parts) > 2 else "."
        rooms[room] = rooms.get(room, 0) + code_lines(file.read_text(encoding="utf-8"))
    largest_first = dict(sorted(rooms.items(), key=lambda item: (-item[1], item[0])))
    return {"total": sum(rooms.values()), "files": len(files), "rooms": largest_first}

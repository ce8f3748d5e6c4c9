"""The command line: `run` writes the ids of one checkout, `compare` says where two runs differ.

`run` puts the checkout's own `src` and `tests/parity` in front of everything else, before any of it
is imported. So one tool asks the same of every revision, through that revision's own cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench import report
from same_tokens import comparison

SCHEMA = "pipeinfer-same-tokens/1"
ROOT = Path(__file__).resolve().parents[2]
EACH, SESSION = 100, 2000  # requests


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python tools/same_tokens", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="the ids that a checkout gives")
    run.add_argument("--tree", type=Path, default=ROOT, help="a checkout, or its src and tests")
    run.add_argument("--json", type=Path, metavar="OUT", help="write digests and ids there")
    said = "instead of all; without names: none"
    run.add_argument("--architectures", nargs="*", metavar="NAME", help=said)
    run.add_argument("--each", type=int, default=EACH, help="requests of each architecture")
    run.add_argument("--session", type=int, default=SESSION, help="requests of the session")
    compare = commands.add_parser("compare", help="which requests differ")
    compare.add_argument("one", type=Path)
    compare.add_argument("other", type=Path)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if requests differ, 2 for what is no result."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    return _compare(options) if options.command == "compare" else _run(options, words)


def _run(options: argparse.Namespace, words: list[str]) -> int:
    tree = options.tree.resolve()
    sys.path[:0] = [str(tree / "src"), str(tree / "tests/parity"), str(ROOT / "tests")]
    # What writes the result is this checkout's, and has loaded a part of its package.
    for name in [one for one in sys.modules if one.partition(".")[0] == "pipeinfer"]:
        del sys.modules[name]
    running = importlib.import_module("same_tokens.running")
    import pipeinfer

    assert Path(pipeinfer.__file__).is_relative_to(tree), "another revision would answer"
    with tempfile.TemporaryDirectory() as folder:
        parts = running.run(Path(folder), options.architectures, options.each, options.session)
    metrics: dict[str, Any] = {
        "tree": str(tree),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        "parts": parts,
    }
    if options.json is not None:
        report.write(options.json, words, metrics, "tools/same_tokens", SCHEMA)
    short = {name: {k: v for k, v in p.items() if k != "requests"} for name, p in parts.items()}
    print(json.dumps(metrics | {"parts": short}))
    if not memory_changes_nothing(parts):
        print("broken: the ids of a session depend on how much memory there is", file=sys.stderr)
        return 1
    return 0


def memory_changes_nothing(parts: dict[str, Any]) -> bool:
    """Whether the sessions, if there are any, gave the same ids."""
    return len({part["digest"] for name, part in parts.items() if name.startswith("session")}) < 2


def _compare(options: argparse.Namespace) -> int:
    one, other = (json.loads(path.read_text()) for path in (options.one, options.other))
    for read, path in ((one, options.one), (other, options.other)):
        if read.get("schema") != SCHEMA:
            print(f"{path} is no result of schema {SCHEMA}", file=sys.stderr)
            return 2
    found = comparison.compare(one, other)
    print(json.dumps({k: v for k, v in found.items() if k != "differences"}))
    for line in found["differences"]:
        print(line, file=sys.stderr)
    return 1 if found["differences"] else 0

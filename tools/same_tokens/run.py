"""`run`: the token ids that a checkout gives.

The checkout's own `src` and `tests/parity` are put in front of everything else, before any of it is
imported. So one tool asks the same of every revision, through that revision's own cores.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.command_line import ROOT

EACH, SESSION = 100, 2000  # requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    add = parser.add_argument
    add("--tree", type=Path, default=ROOT, help="a checkout, or its src and tests")
    said = "instead of all; without names: none"
    add("--architectures", nargs="*", metavar="NAME", help=said)
    add("--each", type=int, default=EACH, help="requests of each architecture")
    add("--session", type=int, default=SESSION, help="requests of the session")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Digests and ids."""
    tree = options.tree.resolve()
    sys.path[:0] = [str(tree / "src"), str(tree / "tests/parity"), str(ROOT / "tests")]
    # What writes the result is this checkout's, and has loaded a part of its package.
    for name in [one for one in sys.modules if one.partition(".")[0] == "pipeinfer"]:
        del sys.modules[name]
    sessions = importlib.import_module("same_tokens.sessions")
    import pipeinfer

    assert Path(pipeinfer.__file__).is_relative_to(tree), "another revision would answer"
    with tempfile.TemporaryDirectory() as folder:
        parts = sessions.run(Path(folder), options.architectures, options.each, options.session)
    same = memory_changes_nothing(parts)
    return {
        "tree": str(tree),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        "parts": parts,
        "broken": [] if same else ["the ids of a session depend on how much memory there is"],
    }


def memory_changes_nothing(parts: dict[str, Any]) -> bool:
    """Whether the sessions, if there are any, gave the same ids."""
    return len({part["digest"] for name, part in parts.items() if name.startswith("session")}) < 2

"""The command line: writes the pages of the reference, or says which differ from the code.

Knows the pages by name; what stands on each is its module's business.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from docs import commands, http, messages, settings

FOLDER = Path(__file__).resolve().parents[2] / "docs/reference"
PAGES: dict[str, Callable[[], str]] = {
    "commands": commands.page,
    "endpoints": http.endpoints_page,
    "errors": http.errors_page,
    "messages": messages.page,
    "metrics": http.metrics_page,
    "requests": http.requests_page,
    "settings": settings.page,
}


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    made = argparse.ArgumentParser(prog="python tools/docs", description="The reference from code.")
    tasks = made.add_subparsers(dest="command", required=True)
    said = "writes docs/reference"
    reference = tasks.add_parser("reference", help=said, description=said, allow_abbrev=False)
    said = "write nothing; the exit code is 1 if a page differs from the code"
    reference.add_argument("--check", action="store_true", help=said)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 if a page that is checked differs."""
    options = parser().parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    wrong = differing()
    for name in wrong:
        if options.check:
            print(f"docs/reference/{name}.md differs from the code", file=sys.stderr)
        else:
            (FOLDER / f"{name}.md").write_text(PAGES[name]())
            print(f"wrote docs/reference/{name}.md")
    return 1 if options.check and wrong else 0


def differing() -> list[str]:
    """The pages that are not as the code has them."""
    return [name for name, make in PAGES.items() if make() != _written(name)]


def _written(name: str) -> str:
    path = FOLDER / f"{name}.md"
    return path.read_text() if path.exists() else ""

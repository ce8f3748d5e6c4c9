"""`list`: the mutants that `run` would test."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mutants import mutations
from mutants.areas import AREAS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say which mutants are drawn."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300, help="in all areas together")
    parser.add_argument("--areas", nargs="+", choices=list(AREAS), default=list(AREAS))


def drawn(options: argparse.Namespace) -> list[mutations.Mutant]:
    """As many in each area, as evenly as can be."""
    each, more = divmod(options.count, len(options.areas))
    return [
        mutant
        for place, area in enumerate(options.areas)
        for mutant in mutations.draw(options.seed, area, each + (place < more))
    ]


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """Prints them."""
    for mutant in drawn(options):
        print(f"{mutant.path}:{mutant.change.line} {mutant.change.operator}\n{mutant.diff}\n")
    return {}

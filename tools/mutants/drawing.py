"""Draws mutants from a seed: as many in each area, and in an area wherever there is most to change.

First a place is drawn, then one of the changes that can be made there. Both follow from the seed,
the line and its text, so that what is edited elsewhere draws the same mutants again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mutants import points
from mutants.areas import AREAS, ROOT


@dataclass(frozen=True)
class Mutant:
    """`text`: the whole module as it is with the change; `path`: relative to the checkout."""

    area: str
    path: Path
    change: points.Change
    text: str
    diff: str


def shares(count: int, names: Iterable[str]) -> dict[str, int]:
    """`count` mutants, as evenly as can be."""
    listed = list(names)
    each, more = divmod(count, len(listed))
    return {name: each + (number < more) for number, name in enumerate(listed)}


def draw(seed: int, area: str, count: int, root: Path = ROOT) -> list[Mutant]:
    """Fewer where the area has fewer places. More of them begin with the same ones."""
    known = points.operators()
    places: list[tuple[bytes, Path, str, list[points.Change]]] = []
    for path in AREAS[area].files(root):
        text = (root / path).read_text(encoding="utf-8")
        lines, seen = text.split("\n"), Counter[str]()
        for (number, column), found in sorted(points.changes(text, known).items()):
            where = f"{seed} {path} {lines[number - 1]} {column}"
            seen[where] += 1  # the same line, once more
            found.sort(key=lambda change, where=where: _key(f"{where} {change.operator}"))
            places.append((_key(f"{where} {seen[where]}"), path, text, found))
    drawn: list[Mutant] = []
    for _, path, text, found in sorted(places, key=lambda place: place[0]):
        if len(drawn) == count:
            break
        for change in found:
            new = points.changed(text, change, known)
            if new is not None:
                said = points.diff(text, new, str(path))
                drawn.append(Mutant(area, path, change, new, said))
                break
    return drawn


def _key(words: str) -> bytes:
    return hashlib.sha256(words.encode()).digest()

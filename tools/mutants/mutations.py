"""Small changes of the code: operators of Cosmic Ray and one of ours, drawn from a seed.

As many are drawn in each area. First a place is drawn, then a change that can be made there. Both
follow from the seed, the line and its text, so that edits elsewhere draw the same mutants again.
Places where a change would change nothing that the code does are excluded, each kind with its
reason.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import Visitor, ast_nodes
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Name

from mutants import exclusions
from mutants.areas import AREAS, ROOT

Position = tuple[int, int]


class DeleteStatement(Operator):
    """Puts `pass` in the place of a statement."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Position, Position]]:
        if node.type == "simple_stmt" and _has_effect(node.children[0]):
            first = node.children[0]
            yield first.start_pos, first.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0]
        node.children[0] = Name("pass", first.start_pos, first.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("f(x)\n", "pass\n"), Example("a.b += 1\n", "pass\n"))


def _has_effect(node: Any) -> bool:
    if node.type == "del_stmt":
        return True
    if node.type in ("atom_expr", "power"):  # a call
        last = node.children[-1]
        return last.type == "trailer" and last.children[0] == "("
    if node.type != "expr_stmt":
        return False
    target, how = node.children[:2]
    if how.type == "operator" and how != "=":
        return True
    function = node.search_ancestor("funcdef")
    begins = function is not None and function.name.value == "__init__"
    stored = target.type in ("atom_expr", "power") and target.children[-1].children[0] in (".", "[")
    return stored and not begins


NEVER_CHANGED = frozenset(("name", "newline", "string", "endmarker"))  # most of all leaves
BRACKETS = frozenset("()[]{},.:=")
NAMELESS = ("VariableReplacer", "VariableInserter")  # of Cosmic Ray's: they want names


@dataclass(frozen=True)
class Change:
    """The `occurrence`-th place of a text at which `operator` applies; lines count from 1."""

    operator: str
    occurrence: int
    line: int
    column: int


def operators() -> dict[str, Operator]:
    """By name."""
    provider = OperatorProvider()
    left_out = exclusions.IDENTITY.union(NAMELESS)
    made = {name: provider[name]() for name in provider if name not in left_out}
    return {**made, DeleteStatement.__name__: DeleteStatement()}


def changes(text: str, known: dict[str, Operator]) -> dict[tuple[int, int], list[Change]]:
    """All changes of a module's text, by where they begin; excluded places aside."""
    left_out, lines = exclusions.ranges(text), text.split("\n")
    counts: Counter[str] = Counter()
    found: dict[tuple[int, int], list[Change]] = defaultdict(list)
    for node in ast_nodes(parso.parse(text)):
        if node.type in NEVER_CHANGED or (node.type == "operator" and node.value in BRACKETS):
            continue
        for name, operator in known.items():
            for (line, column), _ in operator.mutation_positions(node):
                number = counts[name]
                counts[name] += 1
                place = line, len(lines[line - 1][:column].encode())
                if not any(begin <= place < end for begin, end in left_out):
                    found[place].append(Change(name, number, line, column))
    return found


class _Once(Visitor):
    """Applies an operator at one of its places."""

    def __init__(self, operator: Operator, occurrence: int) -> None:
        self._operator, self._left = operator, occurrence

    def visit(self, node: Any) -> Any:
        for index, _ in enumerate(self._operator.mutation_positions(node)):
            self._left -= 1
            if self._left == -1:
                return self._operator.mutate(node, index)
        return node


def changed(text: str, change: Change, known: dict[str, Operator]) -> str | None:
    """The text with the change; None if that is no Python, or the same program."""
    tree = _Once(known[change.operator], change.occurrence).walk(parso.parse(text))
    new = tree.get_code()
    try:
        same = ast.dump(ast.parse(new)) == ast.dump(ast.parse(text))
    except SyntaxError:
        return None
    return None if same else new


def diff(old: str, new: str, name: str) -> str:
    """As `diff -U1` shows it, without its first two lines."""
    lines = unified_diff(old.splitlines(), new.splitlines(), name, name, n=1, lineterm="")
    return "\n".join([*lines][2:])


@dataclass(frozen=True)
class Mutant:
    """`text`: the whole module as it is with the change; `path`: relative to the checkout."""

    area: str
    path: Path
    change: Change
    text: str
    diff: str


def draw(seed: int, area: str, count: int, root: Path = ROOT) -> list[Mutant]:
    """Fewer where the area has fewer places. More of them begin with the same ones."""
    known = operators()
    places: list[tuple[bytes, Path, str, list[Change]]] = []
    for path in AREAS[area].files(root):
        text = (root / path).read_text(encoding="utf-8")
        lines, seen = text.split("\n"), Counter[str]()
        for (number, column), found in sorted(changes(text, known).items()):
            where = f"{seed} {path} {lines[number - 1]} {column}"
            seen[where] += 1  # the same line, once more
            found.sort(key=lambda change, where=where: _key(f"{where} {change.operator}"))
            places.append((_key(f"{where} {seen[where]}"), path, text, found))
    drawn: list[Mutant] = []
    for _, path, text, found in sorted(places, key=lambda place: place[0]):
        if len(drawn) == count:
            break
        for change in found:
            new = changed(text, change, known)
            if new is not None:
                said = diff(text, new, str(path))
                drawn.append(Mutant(area, path, change, new, said))
                break
    return drawn


def _key(words: str) -> bytes:
    return hashlib.sha256(words.encode()).digest()

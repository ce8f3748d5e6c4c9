"""Every small change that could be made to a text: operators of Cosmic Ray, and where they apply.

Knows texts only; which of the changes are made is drawn elsewhere.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

import parso
from cosmic_ray.ast import Visitor, ast_nodes
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

from mutants import exclusions
from mutants.deletion import DeleteStatement

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

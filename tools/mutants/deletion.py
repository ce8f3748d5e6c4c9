"""An operator beside those of Cosmic Ray: a statement that only has an effect is left out.

Deleted are calls whose value nobody takes, augmented assignments, assignments to attributes and
items, and `del`. Assignments in `__init__` stay: without them nothing would run at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Name

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

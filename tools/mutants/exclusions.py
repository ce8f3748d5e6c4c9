"""Places where a change would change nothing that the code does, each kind with its reason.

Strings are never changed, docstrings and `__all__` among them: no operator does that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

# `==` or `is`: the same for small numbers, interned words and objects without an __eq__.
IDENTITY = frozenset(
    f"ReplaceComparisonOperator_{one}_{other}"
    for pair in (("Eq", "Is"), ("NotEq", "IsNot"))
    for one, other in (pair, pair[::-1])
)
# frozen, slots, gc: who may write and what it costs. strict: of zip, states what is so anyway.
STATEMENTS_OF_FACT = frozenset(("frozen", "slots", "gc", "strict"))
TUNING = 10  # a named number from here on: one more or less changes it by a tenth at most

Range = tuple[tuple[int, int], tuple[int, int]]  # (line, column in bytes), the end is outside


def ranges(text: str) -> list[Range]:
    """Of a module's text, where nothing is to be changed."""
    tree = ast.parse(text)
    nodes = [*_constants(tree)]
    for node in ast.walk(tree):
        nodes += _annotations(node)
        nodes += _words(node)
        if isinstance(node, ast.keyword) and node.arg in STATEMENTS_OF_FACT:
            nodes.append(node.value)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in nodes
    ]


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    """Never evaluated."""
    if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
        yield node.returns


def _words(node: ast.AST) -> Iterator[ast.expr]:
    """Lines of the log, and what an error says: for people."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == "log":
            yield node
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from node.exc.args
    if isinstance(node, ast.Assert) and node.msg is not None:
        yield node.msg


def _constants(tree: ast.Module) -> Iterator[ast.expr]:
    """Large numbers that a module gives a name: limits and times that somebody chose."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if isinstance(value, (int, float)) and abs(value) >= TUNING:
                yield node.value

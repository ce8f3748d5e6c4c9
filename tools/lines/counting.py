"""How many lines of a Python text are code: neither blank, nor a comment, nor a docstring.

A docstring is the string that a module, a class or a function begins with. Any other string is
code on all its lines.
"""

from __future__ import annotations

import ast
import io
import tokenize

NO_CODE = frozenset((
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
))  # fmt: skip


def code_lines(text: str) -> int:
    """Raises SyntaxError for what is no Python."""
    docstrings = _docstrings(ast.parse(text))
    lines: set[int] = set()
    told = (0, 0)  # where the last docstring ended
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begin = _begin(token)
        told = docstrings.get(begin, told)
        if token.type not in NO_CODE and begin >= told:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def _docstrings(tree: ast.Module) -> dict[tuple[int, int], tuple[int, int]]:
    """Where they begin -> where they end: line, and offset in bytes."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    found = {}
    for node in nodes:
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            text = first.value
            if isinstance(text.value, str):
                end = (text.end_lineno or 0, text.end_col_offset or 0)
                found[text.lineno, text.col_offset] = end
    return found


def _begin(token: tokenize.TokenInfo) -> tuple[int, int]:
    line, column = token.start
    return line, len(token.line[:column].encode())

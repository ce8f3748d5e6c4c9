"""Markdown from texts of code: headings, lists, tables, types in few words.

Knows nothing of what the pages say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def page(title: str, *parts: str) -> str:
    """A whole page; empty parts are left out."""
    note = "Made from code by `python tools/docs reference`."
    return "\n\n".join((f"# {title}", note, *filter(None, parts))) + "\n"


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are shown as they are; `|` in them is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    shown = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in shown)


def codes(names: Iterable[str]) -> str:
    """Names as code, with commas between."""
    return ", ".join(f"`{name}`" for name in names)


def sentence(text: str) -> str:
    """`text` with a capital letter and a full stop."""
    text = text.strip()
    if not text:
        return ""
    shown = text if text.startswith("`") else text[0].upper() + text[1:]
    return shown if shown.endswith((".", ":")) else f"{shown}."


def prose(docstring: str) -> str:
    """A docstring as Markdown: its paragraphs, and what it lists of attributes."""
    text = "\n".join(map(str.strip, docstring.strip().split("\n")))
    said, _, listed = text.partition("Attributes:\n- ")
    items = (item.partition(": ")[::2] for item in _lines(listed).split("\n- ") if item)
    attributes = bullets(f"{codes(names.split(', '))}: {about}" for names, about in items)
    return "\n\n".join(_plain(part) for part in (_lines(said).strip(), attributes) if part)


def _lines(text: str) -> str:
    """Lines that go on from each other, joined; an item of a list begins one of its own."""
    return re.sub(r"(?<!\n)\n(?!\n|- )", " ", text)


def _plain(text: str) -> str:
    """Nothing outside of code reads as HTML."""
    parts = text.split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def kind(schema: Mapping[str, Any]) -> str:
    """A JSON schema in few words."""
    if "$ref" in schema:
        return "object"
    for several in ("anyOf", "enum"):
        if several in schema:
            options = schema[several]
            shown = [f"`{one}`" if several == "enum" else kind(one) for one in options]
            unique = dict.fromkeys(one for one in shown if one not in ("null", "`None`"))
            return " or ".join(unique)
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))

"""The Jinja environment that chat templates are written for, closed to everything else.

Templates come with checkpoints, so they are foreign code: they see plain data, cannot change it and
cannot reach Python. Offers what transformers offers to them. Knows no checkpoint and no request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeinfer.json_values import JsonValue

Strftime = Callable[[str], str]  # a strftime format -> the formatted local time


def make_environment(strftime_now: Strftime) -> ImmutableSandboxedEnvironment:
    """An environment with `raise_exception`, `strftime_now`, a plain `tojson`, `{% break %}` and
    `{% generation %}`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja says nothing of what the values of these two are.
    filters = cast(dict[str, object], environment.filters)  # pyright: ignore[reportUnknownMemberType]
    variables = cast(dict[str, object], environment.globals)  # pyright: ignore[reportUnknownMemberType]
    filters["tojson"] = _tojson
    variables["raise_exception"] = _raise_exception
    variables["strftime_now"] = strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; in serving it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models have not been trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

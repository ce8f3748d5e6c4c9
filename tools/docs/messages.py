"""The page of all messages between stages: from messages.py and control.py.

Docstrings become prose, fields stand as the source has them.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec

from docs.markdown import bullets, codes, prose
from docs.markdown import page as page_of
from pipeinfer import control, messages, params, step_cost
from pipeinfer.messages import CHANNEL_USERS, CHANNELS

INTRODUCTION = """Stages speak by these messages alone. A message is an array in MessagePack: its \
name, then its fields in order. `Int32s` and `UInt64s` are raw little-endian bytes. A `Number` is \
from 0 to 2^31 - 1, a `NonNegativeInt` from 0, a `PositiveInt` from 1. A frame that holds anything \
else, or that lacks some of its rows, is counted, logged with its channel and sender, and dropped. \
Structs grow only at their end, with defaults. Any other change is a new protocol; this is \
protocol {}. [Architecture](../architecture.md) says who needs which channel, and why."""
CONTROL_SAID = """What people ask of a running stage. These messages are for the process around a \
stage's core, and are not recorded."""


def page() -> str:
    """docs/reference/messages.md."""
    return page_of("Messages", INTRODUCTION.format(messages.PROTOCOL), *_channels(), *_types())


def of_channel(kinds: Any) -> tuple[type[msgspec.Struct], ...]:
    """The messages of one channel."""
    return get_args(kinds) or (kinds,)


def _channels() -> Iterator[str]:
    shown: set[type] = set()
    for channel, kinds in (*CHANNELS.items(), (control.CHANNEL, control.CONTROL)):
        yield f"## {channel}"
        yield CONTROL_SAID if channel == control.CHANNEL else f"Way: {CHANNEL_USERS[channel]}."
        again = [one.__name__ for one in of_channel(kinds) if one in shown]
        if again:
            yield f"Also {codes(again)}, as above."
        for one in of_channel(kinds):
            if one not in shown:
                yield from _struct(one)
        shown.update(of_channel(kinds))


def _struct(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield f"### {kind.__name__}"
    fields = list(msgspec.structs.fields(kind))
    yield prose(inspect.getdoc(kind) or "")
    if fields:
        lines = (f"{one.name}: {_annotation(kind, one.name)}{_default(one)}" for one in fields)
        yield "```python\n" + "\n".join(lines) + "\n```"


def _annotation(kind: type, name: str) -> str:
    """As the source has it."""
    return next(
        str(said[name]).replace("'", '"')
        for said in map(inspect.get_annotations, kind.__mro__)
        if name in said
    )


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    if field.default_factory is not msgspec.NODEFAULT:
        return f" = {_source(field.default_factory())}"
    return f" = {_source(field.default)}"


def _source(value: Any) -> str:
    """As the formatter leaves it, which reads this page too."""
    if isinstance(value, bytes):
        return "b" + json.dumps(value.decode())
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _types() -> Iterator[str]:
    yield "## Types of fields"
    yield bullets(_literals())
    for module in (messages, control, params, step_cost):
        for kind in _structs_of(module):
            if not issubclass(kind, messages.Message):
                yield from _struct(kind)


def _structs_of(module: Any) -> Iterator[type[msgspec.Struct]]:
    for value in vars(module).values():
        own = inspect.isclass(value) and value.__module__ == module.__name__
        if own and issubclass(value, msgspec.Struct):
            yield value


def _literals() -> Iterator[str]:
    for name, value in vars(messages).items():
        if get_origin(value) is Literal:
            yield f"`{name}`: {codes(get_args(value))}"
    low, high = (getattr(typing.get_args(messages.Choice)[1], end) for end in ("ge", "lt"))
    yield f"`Choice`: a number from {low} to {high - 1}; `Choices`: at least one of them"
    yield f"`Alternatives`: a number from 0 to {params.MAX_LOGPROBS}"
    yield "`JsonObject`: whatever JSON has, by texts"

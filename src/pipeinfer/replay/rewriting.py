"""A message with some of its fields changed, however deep they lie: ids, epochs, incarnations.

Knows structs by their fields' names only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import msgspec

# Names whose values are one process's or one run's own.
OWN = ("request_id", "request_ids", "epoch", "incarnation", "incarnations")

Value = TypeVar("Value")
Change = Callable[[Any], Any]


def rewritten(value: Value, changes: Mapping[str, Change]) -> Value:
    """`value` with `changes[name]` applied to every field of that name; tuples of such values
    (`request_ids`) element by element. Returns `value` itself where nothing changes."""
    return _rewritten(value, changes)


def _rewritten(value: Any, changes: Mapping[str, Change]) -> Any:
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            new = _changed(old, changes[name]) if name in changes else _rewritten(old, changes)
            if new is not old:
                changed[name] = new
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple) and any(isinstance(one, msgspec.Struct) for one in value):
        new = tuple(_rewritten(one, changes) for one in value)
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    return value


def _changed(value: Any, change: Change) -> Any:
    if isinstance(value, tuple):
        return tuple(change(one) for one in value)
    return value if value is None else change(value)


class Numbered:
    """Names for values in the order in which they first appear: r0, r1, ..."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._names: dict[Hashable, str] = {}

    def __call__(self, value: Hashable) -> str:
        return self._names.setdefault(value, f"{self._prefix}{len(self._names)}")


class Counted:
    """Small numbers for large ones, in the order in which they first appear; 0 stays 0."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {0: 0}

    def __call__(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))


def canonical_changes() -> dict[str, Change]:
    """Changes under which two runs of the same requests become comparable."""
    requests, epochs, lives = Numbered("r"), Counted(), Counted()
    return {
        "request_id": requests,
        "request_ids": requests,
        "epoch": epochs,
        "incarnation": lives,
        "incarnations": lives,
    }

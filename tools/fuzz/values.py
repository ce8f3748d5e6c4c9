"""Mutations of plain values (lists, dicts, atoms): one place of them becomes something else.

Knows neither MessagePack nor JSON; what neither can hold as a value is put in as raw bytes, which
`wilder` chooses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

ATOMS = (
    None, True, False, 0, 1, -1, 255, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**63), 0.0, -0.0, 1e308, 1e-308, "", "a", "é", "\x00", "null", "a" * 300, [], {},
)  # fmt: skip


def mutated(value: Any, source: Random, wilder: Callable[[Random], Any]) -> Any:
    """A copy of `value` with one to three places changed. wilder: makes a raw value."""
    changed = [copy.deepcopy(value)]
    for _ in range(source.choice((1, 1, 2, 3))):
        holder, place = source.choice(_places(changed))
        _change(holder, place, source, wilder)
    return changed[0] if changed else None


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, index or key) of everything within `value`."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 500:
        holder = waiting.pop()
        for place in holder if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, place))
            if isinstance(holder[place], (list, dict)):
                waiting.append(holder[place])
    return found or [([None], 0)]


def _change(holder: Any, place: Any, source: Random, wilder: Callable[[Random], Any]) -> None:
    kind, value = source.randrange(9), holder[place]
    if kind < 3:
        holder[place] = source.choice(ATOMS)
    elif kind == 3:
        holder[place] = wilder(source)
    elif kind == 4:
        holder[place] = [value]
    elif kind == 5 and isinstance(holder, list) and len(holder) > 1:
        del holder[place]
    elif kind == 6 and isinstance(value, list):
        holder[place] = value * source.choice((2, 3, 100))
    elif kind == 7 and isinstance(value, int):
        holder[place] = value + source.choice((-1, 1, 2**32))
    elif isinstance(holder, list):
        holder.insert(place, copy.deepcopy(value))
    else:
        holder[source.choice(("", "a", "n", "tools"))] = copy.deepcopy(value)

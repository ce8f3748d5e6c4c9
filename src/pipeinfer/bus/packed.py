"""Whether the packed arrays in a message hold together: whole items, and rows that are all there.

Which fields are arrays is said in messages.py; what is in them is the business of whoever takes the
message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from msgspec import inspect

from pipeinfer.messages import Admitted, Plan, Result

# Arrays with an item for each row.
ROWS: dict[type, tuple[str, ...]] = {
    Plan: ("slots", "counts"),
    Admitted: ("slots", "cached"),
    Result: ("slots", "starts", "counts", "produced"),
}


class _Arrays(NamedTuple):
    """Of structs of one `kind`. own: (name, bytes of an item). rows: names of arrays of one length.
    inner: (name, whether it holds several, their arrays) of fields that hold such structs."""

    kind: type
    own: tuple[tuple[str, int], ...]
    rows: tuple[str, ...]
    inner: tuple[tuple[str, bool, _Arrays], ...]

    def trouble(self, values: Sequence[object]) -> str:
        """What is wrong with those of `values`; "" if nothing is."""
        # Hot path, once for every token of every stream: field by field, so that rows cost little.
        for name, size in self.own:
            for raw in map(attrgetter(name), values):
                if raw and len(raw) % size:
                    return f"{len(raw)} bytes of {name} are no whole number of {size}"
        for value in values if self.rows else ():
            lengths = [len(getattr(value, name)) for name in self.rows]
            if lengths.count(lengths[0]) != len(lengths):
                return f"{', '.join(self.rows)} have {', '.join(map(str, lengths))} bytes"
        for name, several, arrays in self.inner:
            held = [one for one in map(attrgetter(name), values) if one is not None]
            if several:
                held = list(chain.from_iterable(held))
            if held and (wrong := arrays.trouble(held)):
                return f"{name}: {wrong}"
        return ""


def _arrays(info: inspect.StructType) -> _Arrays | None:
    """Those of a struct; None if there are none, however deep."""
    own: list[tuple[str, int]] = []
    inner: list[tuple[str, bool, _Arrays]] = []
    for field in info.fields:
        for part in _parts(field.type):
            declared: dict[str, int] | None = getattr(part, "extra", None)  # of an annotated type
            size = (declared or {}).get("item_bytes", 0)
            several = isinstance(part, inspect.VarTupleType)
            held = part.item_type if isinstance(part, inspect.VarTupleType) else part
            if size:
                own.append((field.name, size))
            elif isinstance(held, inspect.StructType):
                arrays = _arrays(held)
                if arrays is not None:
                    inner.append((field.name, several, arrays))
    kind = info.cls
    return _Arrays(kind, tuple(own), ROWS.get(kind, ()), tuple(inner)) if own or inner else None


def _parts(info: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types of a union, or the one that it is."""
    return info.types if isinstance(info, inspect.UnionType) else (info,)


Check = Callable[[Sequence[object]], str]


def checks(kinds: Iterable[object]) -> dict[type, Check]:
    """By message, for those that have arrays: what says what is wrong with any of several such, ""
    if nothing is. `kinds`: of each channel the messages, as channels.py has them."""
    found: dict[type, Check] = {}
    for info in chain.from_iterable(_parts(inspect.type_info(kind)) for kind in kinds):
        arrays = _arrays(info) if isinstance(info, inspect.StructType) else None
        if arrays is not None:
            found[arrays.kind] = arrays.trouble
    return found

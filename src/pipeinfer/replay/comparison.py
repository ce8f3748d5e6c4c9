"""Two messages field by field: where they first differ, named as one would write it in Python.

Knows structs, tuples and packed token ids; nothing of traces, stages or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from pipeinfer.packing import unpack
from pipeinfer.replay.varying import left_out

ID_BYTES = 4
MISSING = "(missing)"

Skips = Callable[[str], frozenset[str]]


class Mismatch(NamedTuple):
    """`field` is a path such as `rows[2].ids[0]`; the values are plain: numbers, text, lists."""

    field: str
    recorded: object
    replayed: object


def first_mismatch(recorded: object, replayed: object, skips: Skips = left_out) -> Mismatch | None:
    """Where `replayed` first differs from `recorded`, in the order of the fields, or None.

    `skips(type name)`: fields of such a struct that are left out. Floats are equal or not: what a
    core computes from the same numbers is the same to the last bit.
    """
    return next(_differences("", recorded, replayed, skips), None)


def plain(value: object) -> object:
    """`value` as JSON could hold it: structs as lists with their type's name, packed ids as
    integers."""
    if isinstance(value, msgspec.Struct):
        fields = value.__struct_fields__
        return {type(value).__name__: {name: plain(getattr(value, name)) for name in fields}}
    if isinstance(value, bytes):
        return unpack(value).tolist() if len(value) % ID_BYTES == 0 else value.hex()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return value


def _differences(path: str, a: Any, b: Any, skips: Skips) -> Iterator[Mismatch]:
    if type(a) is not type(b):
        named = isinstance(a, msgspec.Struct) and isinstance(b, msgspec.Struct)
        if named:
            yield Mismatch(_join(path, "type"), type(a).__name__, type(b).__name__)
        elif a != b or isinstance(a, bool) or isinstance(b, bool):
            yield Mismatch(path, plain(a), plain(b))
    elif isinstance(a, msgspec.Struct):
        skipped = skips(type(a).__name__)
        for name in a.__struct_fields__:
            if name not in skipped:
                yield from _differences(
                    _join(path, name), getattr(a, name), getattr(b, name), skips
                )
    elif a == b:
        return
    elif isinstance(a, bytes) and len(a) % ID_BYTES == 0 and len(b) % ID_BYTES == 0:
        yield from _in_sequence(path, unpack(a).tolist(), unpack(b).tolist(), skips)
    elif isinstance(a, (list, tuple)):
        yield from _in_sequence(path, a, b, skips)
    elif isinstance(a, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            at = f"{path}[{key!r}]"
            yield from _differences(at, a.get(key, MISSING), b.get(key, MISSING), skips)
    else:
        yield Mismatch(path, plain(a), plain(b))


def _in_sequence(path: str, a: Sequence[Any], b: Sequence[Any], skips: Skips) -> Iterator[Mismatch]:
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        yield from _differences(f"{path}[{at}]", one, other, skips)
    if len(a) != len(b):
        at = min(len(a), len(b))
        yield Mismatch(
            f"{path}[{at}]",
            plain(a[at]) if at < len(a) else MISSING,
            plain(b[at]) if at < len(b) else MISSING,
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

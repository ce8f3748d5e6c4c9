"""Values of a type, drawn from its bounds and a little beyond sense: for messages and for bodies.

Knows msgspec's description of types. What it makes is plain (lists, dicts, atoms), as a decoder
would see it; a struct that is an array is a list with its tag in front.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

INTEGERS = (0, 1, 2, 3, 7, 16, 255, 2048, -1, -2, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, 1.0, 0.5, 2.0, -1.0, 1e-300, 5e-324, 1e300, 1e-38, 1e9, math.inf, -math.inf)
TEXTS = ("", "a", "request-1", "gateway-0", "tokenizer-0", "scheduler-0", "detokenizer-0", "no-9",
         "é🙂", "\x00", "a b c", "<|im_end|>", "count from 1 to 9")  # fmt: skip
DEEPEST = 4


def drawn(info: Any, source: Random, depth: int = 0) -> Any:
    """A value of the type that `info` describes (msgspec.inspect.type_info)."""
    make = _MAKERS.get(type(info))
    if make is None:
        raise TypeError(f"no examples of {info}")
    return make(info, source, depth)


def _integer(info: Any, source: Random, _depth: int) -> int:
    low = info.ge if info.ge is not None else -(2**63)
    high = info.le if info.le is not None else 2**64 - 1
    near = [n for n in (*INTEGERS, low, high) if low <= n <= high]
    return (
        source.choice(near) if source.random() < 0.4 else min(max(source.randrange(9), low), high)
    )


def _float(info: Any, source: Random, _depth: int) -> float:
    fits = [
        n for n in FLOATS
        if (info.ge is None or n >= info.ge) and (info.le is None or n <= info.le)
    ]  # fmt: skip
    return source.choice(fits)


def _text(info: Any, source: Random, _depth: int) -> str:
    text = source.choice(TEXTS)
    if source.random() < 0.02:
        text *= 300
    return text if info.max_length is None else text[: info.max_length]


def _bytes(_info: Any, source: Random, _depth: int) -> bytes:
    """Mostly token ids; at times no whole number of them."""
    ids = [source.choice((0, 1, 97, 256, 263, 264, 2**31 - 1)) for _ in range(source.randrange(6))]
    raw = b"".join(n.to_bytes(4, "little") for n in ids)
    return raw + b"x" * (source.random() < 0.05)


def _several(info: Any, source: Random, depth: int) -> list[Any]:
    few = 0 if depth > DEEPEST else source.choice((0, 1, 1, 2, 3))
    return [drawn(info.item_type, source, depth + 1) for _ in range(few)]


def _fixed(info: Any, source: Random, depth: int) -> list[Any]:
    return [drawn(item, source, depth + 1) for item in info.item_types]


def _dict(info: Any, source: Random, depth: int) -> dict[Any, Any]:
    few = 0 if depth > DEEPEST else source.randrange(3)
    keys = [drawn(info.key_type, source, depth + 1) for _ in range(few)]
    return {key: drawn(info.value_type, source, depth + 1) for key in keys}


def _struct(info: Any, source: Random, depth: int) -> Any:
    fields = {}
    for field in info.fields:
        if not field.required and source.random() < 0.3:
            if not info.array_like:
                continue
            if field.default is not msgspec.NODEFAULT:
                fields[field.encode_name] = msgspec.to_builtins(
                    field.default, builtin_types=(bytes,)
                )
                continue
        fields[field.encode_name] = drawn(field.type, source, depth + 1)
    if info.array_like:
        return ([] if info.tag is None else [info.tag]) + list(fields.values())
    return fields


def _any(_info: Any, source: Random, depth: int) -> Any:
    kind = source.randrange(8 if depth < DEEPEST else 4)
    if kind < 4:
        return (None, True, source.choice(INTEGERS), source.choice(TEXTS))[kind]
    if kind < 6:
        return [_any(None, source, depth + 1) for _ in range(source.randrange(4))]
    return {source.choice(TEXTS): _any(None, source, depth + 1) for _ in range(source.randrange(4))}


_MAKERS: dict[type, Any] = {
    inspect.IntType: _integer,
    inspect.FloatType: _float,
    inspect.StrType: _text,
    inspect.BytesType: _bytes,
    inspect.BoolType: lambda _info, source, _depth: source.random() < 0.5,
    inspect.NoneType: lambda _info, _source, _depth: None,
    inspect.LiteralType: lambda info, source, _depth: source.choice(info.values),
    inspect.UnionType: lambda info, source, depth: drawn(source.choice(info.types), source, depth),
    inspect.ListType: _several,
    inspect.VarTupleType: _several,
    inspect.TupleType: _fixed,
    inspect.DictType: _dict,
    inspect.StructType: _struct,
    inspect.AnyType: _any,
    inspect.Metadata: lambda info, source, depth: drawn(info.type, source, depth),
}

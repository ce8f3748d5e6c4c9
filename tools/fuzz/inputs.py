"""Inputs of the fuzzer: mutations of bytes, of plain values and of messages, and random messages.

An input of several parts is a sequence of (length u24, bytes); whatever is cut short is a part
too, so that every sequence of bytes is an input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from pipeinfer import control
from pipeinfer.bus.frames import LINK_CHANNEL, LINK_MESSAGES
from pipeinfer.messages import CHANNELS

LONGEST = 1 << 16  # bytes of an input
LONGEST_PART = (1 << 24) - 1
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xC1, 0xDC, 0xDD, 0xDE, 0xDF, 0xC9, 0xC6)  # MessagePack's, too


def mutated_bytes(data: bytes, source: Random) -> bytes:
    """`data` with one to eight small changes."""
    changed = bytearray(data)
    for _ in range(1 << source.randrange(4)):
        _change_bytes(changed, source)
    return bytes(changed[:LONGEST])


def _change_bytes(data: bytearray, source: Random) -> None:
    at = source.randrange(len(data) + 1)
    kind = source.randrange(8)
    if not data or kind == 0:
        data[at:at] = source.randbytes(source.choice((1, 1, 2, 4, 16)))
    elif kind == 1:
        data[at % len(data)] ^= 1 << source.randrange(8)
    elif kind == 2:
        data[at % len(data)] = source.choice(NUMBERS)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        del data[at : at + source.choice((1, 2, 4, 32))]
    elif kind == 5:
        begin = source.randrange(len(data))
        data[at:at] = data[begin : begin + source.choice((1, 4, 32))]
    elif kind == 6:
        data[at : at + 4] = source.choice((0, 1, 2**31 - 1, 2**32 - 1)).to_bytes(4, "big")
    else:
        data[at:at] = bytes([source.choice(NUMBERS)]) * source.choice((2, 50, 1500))


def changed_program(data: bytes, source: Random, sizes: Sequence[int], longest: int) -> bytes:
    """A program of operations, one or more bytes each, with some more of them, some twice, some
    others or some fewer. sizes: of a change, in bytes; longest: of the program."""
    changed = bytearray(data or b"\0")
    at, size = source.randrange(len(changed)), source.choice(sizes)
    kind = source.randrange(4)
    if kind == 0:
        changed += source.randbytes(size)
    elif kind == 1:
        changed[at:at] = changed[at : at + size]
    elif kind == 2:
        changed[at : at + size] = source.randbytes(size)
    else:
        del changed[at : at + size]
    return bytes(changed[:longest]) or b"\0"


def joined(parts: Sequence[bytes]) -> bytes:
    """An input of several parts, each cut off where its length could not be said."""
    cut = (part[:LONGEST_PART] for part in parts)
    return b"".join(len(part).to_bytes(3, "big") + part for part in cut)


def parts(data: bytes) -> list[bytes]:
    """The parts of an input."""
    found: list[bytes] = []
    while data:
        length = int.from_bytes(data[:3], "big")
        found.append(data[3 : 3 + length])
        data = data[3 + length :]
    return found


ATOMS = (
    None, True, False, 0, 1, -1, 255, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**63), 0.0, -0.0, 1e308, 1e-308, "", "a", "é", "\x00", "null", "a" * 300, [], {},
)  # fmt: skip


def mutated_value(value: Any, source: Random, wilder: Callable[[Random], Any]) -> Any:
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


TYPES: dict[str, Any] = {
    **CHANNELS,
    control.CHANNEL: control.CONTROL,
    LINK_CHANNEL: LINK_MESSAGES,
}
NAMES = tuple(TYPES)
DEPTHS = (2, 30, 500, 1100, 5000, 60_000)

_infos = {channel: inspect.type_info(kind) for channel, kind in TYPES.items()}
encode = msgspec.msgpack.Encoder().encode


def kinds(channel: str) -> list[Any]:
    """The descriptions of the messages of a channel."""
    info = _infos[channel]
    return list(info.types) if isinstance(info, inspect.UnionType) else [info]


def example(channel: str, source: Random) -> Any:
    """A message of the channel, well typed, as plain values."""
    return drawn(source.choice(kinds(channel)), source)


def raw(source: Random) -> msgspec.Raw:
    """What an encoder would not write: deep nesting, forged lengths, types that nobody uses."""
    depth = source.choice(DEPTHS)
    forged = source.choice((1, 2**16, 2**31 - 1, 2**32 - 1)).to_bytes(4, "big")
    return msgspec.Raw(
        source.choice(
            (
                b"\x91" * depth + b"\xc0",  # arrays
                b"\x81\xa0" * depth + b"\xc0",  # maps
                b"\x81" * depth + b"\xc0" * (depth + 1),  # maps as keys
                b"\xdd" + forged,  # an array of so many
                b"\xdf" + forged,  # a map
                b"\xc6" + forged,  # bytes
                b"\xdb" + forged,  # text
                b"\xc9" + forged + b"\x05",  # an extension
                b"\xd6\xff" + forged,  # a time
                b"\xc7\x0c\xff" + forged * 3,
                b"\xa2\xc3\x28",  # text that is no UTF-8
                b"\xc1",  # never used
                b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
                b"\x81\x90\xc0",  # a list as a key
                b"\x81\xc4\x01a\xc0",
            )
        )
    )


def mutated_message(body: bytes, source: Random) -> bytes:
    """Another message, made from one; a body that is none stays as it is."""
    try:
        value = msgspec.msgpack.decode(body)
        if not isinstance(value, list):
            return body
        return encode(mutated_value(value, source, raw))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return body


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

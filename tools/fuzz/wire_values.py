"""Every message of the protocol as plain values, and raw MessagePack that no encoder would make.

Knows messages.py and its messages, and no stage.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from msgspec import inspect

from fuzz import examples, values
from pipeinfer import control
from pipeinfer.bus import reliable
from pipeinfer.messages import CHANNELS

TYPES: dict[str, Any] = {
    **CHANNELS,
    control.CHANNEL: control.CONTROL,
    reliable.CHANNEL: reliable.LINK,
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
    return examples.drawn(source.choice(kinds(channel)), source)


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


def mutated(body: bytes, source: Random) -> bytes:
    """Another message, made from one; a body that is none stays as it is."""
    try:
        value = msgspec.msgpack.decode(body)
        if not isinstance(value, list):
            return body
        return encode(values.mutated(value, source, raw))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return body

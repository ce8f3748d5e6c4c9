"""Mutations of bytes that know nothing of their structure, and inputs made of several parts.

An input of several parts is a sequence of (length u24, bytes); whatever is cut short is a part too,
so that every sequence of bytes is an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

LONGEST = 1 << 16  # bytes of an input
LONGEST_PART = (1 << 24) - 1
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xC1, 0xDC, 0xDD, 0xDE, 0xDF, 0xC9, 0xC6)  # MessagePack's, too


def mutated(data: bytes, source: Random) -> bytes:
    """`data` with one to eight small changes."""
    changed = bytearray(data)
    for _ in range(1 << source.randrange(4)):
        _change(changed, source)
    return bytes(changed[:LONGEST])


def _change(data: bytearray, source: Random) -> None:
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

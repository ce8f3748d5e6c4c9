"""A handful of token ids as the bytes that messages carry, and back.

As `pack` and `unpack` of messages.py, without an array: for one id, the usual case, that costs more
than its use. Knows no message.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeinfer.messages import unpack


def pack_few(ids: Iterable[int]) -> bytes:
    """As `pack`."""
    return b"".join([token.to_bytes(4, "little", signed=True) for token in ids])


def unpack_few(raw: bytes) -> list[int]:
    """As `unpack`, but Python's integers; more than one take the way through an array."""
    if len(raw) == 4:
        return [int.from_bytes(raw, "little", signed=True)]
    return unpack(raw).tolist()

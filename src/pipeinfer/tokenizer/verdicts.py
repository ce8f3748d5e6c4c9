"""What trials found out about grammars, so that each is tried once.

Grammars are known by digests, so that many are remembered: one client's must not push others' out.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import msgspec

from pipeinfer.params import StructuredOutputs

REMEMBERED = 16_384  # grammars that were asked for last
LONGEST = 500  # letters of a refusal, which may quote a client


def digest(spec: StructuredOutputs) -> bytes:
    """By which a grammar is known; 16 bytes."""
    return blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()


class Verdicts:
    """By digest."""

    def __init__(self) -> None:
        self._refusals: OrderedDict[bytes, str] = OrderedDict()

    def get(self, known: bytes) -> str | None:
        """Why the grammar is refused, "" if it is served; None if nobody knows."""
        if known in self._refusals:
            self._refusals.move_to_end(known)
        return self._refusals.get(known)

    def put(self, known: bytes, refusal: str) -> None:
        """Remembers it."""
        self._refusals[known] = refusal[:LONGEST]
        if len(self._refusals) > REMEMBERED:
            self._refusals.popitem(last=False)

"""What trials found out about grammars, so that each is tried once.

Grammars are known by digests, so that many are remembered: one client's must not push others' out.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from pipeinfer.params import StructuredOutputs

MAX_VERDICTS = 16_384  # grammars that were asked for last
MAX_REFUSAL_LETTERS = 500  # letters of a refusal, which may quote a client


def grammar_digest(spec: StructuredOutputs) -> bytes:
    """By which a grammar is known; 16 bytes."""
    return blake2b(msgspec.msgpack.encode(spec), digest_size=16).digest()


class Verdict(NamedTuple):
    """`refusal`: why the grammar is refused, "" if it is served. `slow`: as in Tried."""

    refusal: str = ""
    slow: bool = False


class VerdictCache:
    """By digest."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def get(self, known: bytes) -> Verdict | None:
        """None if nobody knows."""
        if known in self._verdicts:
            self._verdicts.move_to_end(known)
        return self._verdicts.get(known)

    def put(self, known: bytes, verdict: Verdict) -> None:
        """Remembers it."""
        self._verdicts[known] = Verdict(verdict.refusal[:MAX_REFUSAL_LETTERS], verdict.slow)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

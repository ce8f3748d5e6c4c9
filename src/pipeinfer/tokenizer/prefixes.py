"""What a router believes one group to have cached: an approximate radix tree as a chain of hashes.

Fed by what was sent to the group and by how much the group says it evicted. Knows token ids and
counts; a wrong belief costs a prefill, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

BLOCK_TOKENS = 64  # tokens that are believed cached, or not, together


def block_hashes(prompt_ids: np.ndarray, cache_salt: str) -> list[bytes]:
    """A key for each whole block of `prompt_ids` int32 [n]; it stands for the prefix up to there.

    Keys do not depend on the process, so that a recorded run routes the same way again.
    """
    key = blake2b(cache_salt.encode(), digest_size=8).digest()
    raw = np.ascontiguousarray(prompt_ids, dtype="<i4").tobytes()
    keys: list[bytes] = []
    for end in range(4 * BLOCK_TOKENS, len(raw) + 1, 4 * BLOCK_TOKENS):
        key = blake2b(key + raw[end - 4 * BLOCK_TOKENS : end], digest_size=8).digest()
        keys.append(key)
    return keys


class ApproximateCache:
    """The prefixes of one group, least recently used first. What changes them returns the keys that
    were held and no longer are."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._evicted_rest = 0  # tokens evicted over there that do not make a block yet

    def matched_tokens(self, hashes: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt with the chain `keys` that should be cached."""
        count = 0
        for key in hashes:
            if key not in self._blocks:
                break
            count += 1
        return count * BLOCK_TOKENS

    def add(self, hashes: Sequence[bytes], capacity: int) -> list[bytes]:
        """A prompt went there; the group's pool holds `capacity` tokens, 0: unknown."""
        # The end first: of one prompt its beginning is used last, so that it is forgotten last.
        for key in reversed(hashes):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        return (
            self._evict_blocks(len(self._blocks) - max(capacity // BLOCK_TOKENS, 1))
            if capacity
            else []
        )

    def evict(self, tokens: int) -> list[bytes]:
        """So many tokens were evicted over there: the same number is forgotten here."""
        blocks, self._evicted_rest = divmod(self._evicted_rest + tokens, BLOCK_TOKENS)
        return self._evict_blocks(blocks)

    def clear(self) -> list[bytes]:
        """The group began with an empty cache."""
        self._evicted_rest = 0
        return self._evict_blocks(len(self._blocks))

    def __len__(self) -> int:
        """Tokens believed cached."""
        return len(self._blocks) * BLOCK_TOKENS

    def _evict_blocks(self, blocks: int) -> list[bytes]:
        count = min(max(blocks, 0), len(self._blocks))
        return [self._blocks.popitem(last=False)[0] for _ in range(count)]

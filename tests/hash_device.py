"""A device for tests whose KV is checkable: a token's KV is a hash of all tokens up to it.

Whatever reads a wrong, a stale or a foreign page sees a wrong hash and samples other tokens. Knows
Step and nothing else of pipeinfer. Import it as `import hash_device`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from page_mirror import PageMirror
from pipeinfer.step import LAST_TOKEN, Step

VOCABULARY = 4
MASK = 2**64 - 1


def chain(tokens: Sequence[int], before: int = 0) -> list[int]:
    """The KV of `tokens` that follow a token with KV `before`."""
    kv = []
    for token in tokens:
        before = ((before ^ (int(token) + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK
        before ^= before >> 29
        kv.append(before)
    return kv


def choose(kv: np.ndarray, seed: int) -> int:
    """The token sampled after attending to `kv`, uint64 [n], all of a sequence's KV."""
    mixed = (int(kv.sum(dtype=np.uint64)) ^ (seed * 0x2545F4914F6CDD1D)) * 0x9E3779B97F4A7C15
    return ((mixed & MASK) >> 33) % VOCABULARY


def continuation(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The `count` tokens that an undisturbed device samples after `prompt`."""
    tokens, kv = list(prompt), chain(prompt)
    for _ in range(count):
        tokens.append(choose(np.array(kv, np.uint64), seed))
        kv += chain(tokens[-1:], kv[-1])
    return tokens[len(prompt) :]


class HashDevice:
    """Runs steps in order, as a real one does: KV and last tokens live here alone."""

    def __init__(self, pages: int, page_size: int, max_slots: int) -> None:
        self.page_size = page_size
        self.kv = np.zeros((pages, page_size), np.uint64)
        self.last_token = np.full(max_slots, -99)
        self.slots = PageMirror(max_slots)

    def read(self, pages: np.ndarray, count: int) -> np.ndarray:
        """KV of the first `count` positions of a row with these pages, uint64 [count]."""
        at = np.arange(count)
        return self.kv[pages[at // self.page_size], at % self.page_size]

    def run(self, step: Step) -> np.ndarray:
        """Computes the step; int32 ids of the rows that sample, in the step's order."""
        ids, token_at = [], 0
        self.kv[step.delta.pages_to_zero] = 0
        self.slots.apply(step.delta)
        table = self.slots.pages(step, self.page_size)
        for row, (slot, start, count) in enumerate(
            zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        ):
            tokens = step.tokens[token_at : token_at + count].tolist()
            token_at += count
            if tokens == [LAST_TOKEN]:
                tokens = [int(self.last_token[slot])]
            pages = table[row]
            before = int(self.read(pages, start)[-1]) if start else 0
            at = np.arange(start, start + count)
            assert (pages[at // self.page_size] > 0).all(), "wrote to the dummy page"
            self.kv[pages[at // self.page_size], at % self.page_size] = chain(tokens, before)
            if step.samples[row]:
                seed = int(step.fields["seed"][len(ids)])
                ids.append(choose(self.read(pages, start + count), seed))
                self.last_token[slot] = ids[-1]
        assert token_at == len(step.tokens)
        return np.array(ids, np.int32)

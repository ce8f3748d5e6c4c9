"""What the memory knows of the request in each slot, as arrays over slots.

Knows no page and no sampling. The arrays are the hot path's; the lists are touched only where a
request comes, goes, or computes tokens of its prompt.
"""

from __future__ import annotations

import numpy as np


class SlotArrays:
    """active: bool [max_slots]; the others int32 [max_slots], 0 in empty slots.

    admitted: ids that were; known: those, and what was told since; computed: positions whose KV is
    or will be in the pages, once all planned steps have run (above `known` they come from sampled
    ids that only the device knows); max_total: the request never grows past that many tokens.
    """

    def __init__(self, max_slots: int) -> None:
        self.num_slots = max_slots
        self.active = np.zeros(max_slots, dtype=bool)
        self.num_known = np.zeros(max_slots, dtype=np.int32)
        self.num_computed = np.zeros(max_slots, dtype=np.int32)
        self.max_total = np.zeros(max_slots, dtype=np.int32)
        self.num_admitted = np.zeros(max_slots, dtype=np.int32)
        self.tokens: list[np.ndarray | None] = [None] * max_slots  # int32 [known]
        self.locked_node: list[object] = [None] * max_slots  # where this request's lock is
        self.salt: list[str] = [""] * max_slots

    def put(self, slot: int, tokens: np.ndarray, max_total: int, salt: str) -> None:
        """Fills an empty slot; nothing is computed yet."""
        self.active[slot] = True
        self.num_known[slot] = len(tokens)
        self.num_computed[slot] = 0
        self.max_total[slot] = max_total
        self.num_admitted[slot] = len(tokens)
        self.tokens[slot] = tokens
        self.salt[slot] = salt

    def extend(self, slot: int, tokens: np.ndarray) -> None:
        """More ids of an active slot are known: some of them may be computed already."""
        self.tokens[slot] = np.concatenate((self.known_tokens(slot), tokens))
        self.num_known[slot] += len(tokens)

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self.active[slot] = False
        self.num_admitted[slot] = self.num_known[slot] = self.num_computed[slot] = self.max_total[
            slot
        ] = 0
        self.tokens[slot] = None
        self.locked_node[slot] = None
        self.salt[slot] = ""

    def known_tokens(self, slot: int) -> np.ndarray:
        """The ids that were told, int32 [known]; the slot must be active."""
        tokens = self.tokens[slot]
        assert tokens is not None, f"slot {slot} is empty"
        return tokens

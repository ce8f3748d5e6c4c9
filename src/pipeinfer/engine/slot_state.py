"""What a device keeps of the requests in their slots, and how it learns of changes.

One buffer of words, so that whatever changes is a list of indices and values; one writer, what
computes steps. The last slot is nobody's: padding rows have it. Knows no request.

    | page table | fields | numbers of edits | edits | bans |: (slots + 1) times P, F, 1, 3 E, B
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.engine.fields import FIELDS, filled
from pipeinfer.kernels.tables import BAN_HEAD, BansBySlot, BySlot, EditsBySlot
from pipeinfer.params import LONGEST_BAD, MOST_BAD_IDS, MOST_BAD_WORDS
from pipeinfer.steps.step import Bans, Delta, Edits
from pipeinfer.tensors import tensor_of

# Two words a slot first, so that these begin at an even one.
ORDER = sorted(FIELDS, key=lambda field: -np.dtype(field.dtype).itemsize)
WIDE = sum(np.dtype(field.dtype).itemsize == 8 for field in FIELDS)
FIELD_WORDS = len(FIELDS) + WIDE
SEQUENCES = 2 * MOST_BAD_WORDS  # each has two spellings
BANS = BAN_HEAD + LONGEST_BAD + SEQUENCES + 1 + MOST_BAD_IDS  # words of a slot
TORCH = {8: torch.int64, 4: torch.int32}  # what has no name in torch is its bits


class SlotState:
    """For `slots` requests with up to `pages` pages and `edits` edits each.

    nobody: the last slot. by_slot, edits: what kernels read. words: all of it. biased: on the host,
    bool [slots], whose edits raise or lower logits.
    """

    def __init__(self, slots: int, pages: int, edits: int, device: torch.device) -> None:
        self.nobody, many = slots, slots + 1
        self._pages = pages
        self._edits = edits
        self.biased = np.zeros(slots, dtype=bool)
        self._fields_at = many * pages
        self._counts_at = self._fields_at + many * FIELD_WORDS
        self._edits_at = self._counts_at + many
        self._bans_at = self._edits_at + 3 * many * edits
        words = np.zeros(self._bans_at + many * BANS, dtype=np.int32)
        fields = filled(many)
        words[self._fields_at : self._counts_at] = np.concatenate(
            [fields[field.name].view(np.int32) for field in ORDER]
        )
        self.words = tensor_of(words).to(device)
        self.by_slot = BySlot(
            table=self.words[: self._fields_at].view(many, pages),
            fields=self.words[self._fields_at : self._counts_at],
            last_token=torch.zeros(many, dtype=torch.int64, device=device),
            wide=WIDE,
            narrow=len(FIELDS) - WIDE,
        )
        self.edits = EditsBySlot(
            self.words[self._counts_at : self._edits_at],
            self.words[self._edits_at : self._bans_at].view(3, many, edits),
            BansBySlot(
                self.words[self._bans_at :].view(many, BANS),
                LONGEST_BAD,
                SEQUENCES,
                self.by_slot.last_token,
            ),
        )

    def changes(self, delta: Delta) -> np.ndarray:
        """int32 [2n]: the indices in `words` that `delta` changes, each with its new value."""
        indices, values = delta.slots * np.int32(self._pages) + delta.columns, delta.pages
        if len(delta.admitted):
            more = self._admitted(delta)
            indices = np.concatenate([indices, *(index for index, _ in more)])
            values = np.concatenate([values, *(value for _, value in more)])
        pairs = np.empty(2 * len(indices), dtype=np.int32)
        pairs[0::2], pairs[1::2] = indices, values
        return pairs

    def _admitted(self, delta: Delta) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of slots that were filled: fields, and edits."""
        many, slots = self.nobody + 1, delta.admitted
        found: list[tuple[np.ndarray, np.ndarray]] = []
        begin = self._fields_at
        for field in ORDER:
            wide = np.dtype(field.dtype).itemsize // 4
            values = delta.fields[field.name].view(np.int32).reshape(-1, wide)
            for word in range(wide):
                found.append((begin + wide * slots + word, values[:, word]))
            begin += wide * many
        counts = dict.fromkeys(slots.tolist(), 0)
        banned = counts.copy()
        self.biased[slots] = False
        for edits in delta.edits:
            self.biased[edits.slot] = edits.values.any()
            counts[edits.slot] = -len(edits.ids) if edits.only else len(edits.ids)
            found += self._edited(edits)
            if edits.bans is not None:
                banned[edits.slot] = len(edits.bans.ends)
                found += self._banned(edits.slot, edits.bans)
        found.append((self._counts_at + slots, np.fromiter(counts.values(), np.int32)))
        found.append((self._bans_at + slots * BANS, np.fromiter(banned.values(), np.int32)))
        return found

    def _edited(self, edits: Edits) -> list[tuple[np.ndarray, np.ndarray]]:
        """Raises ValueError for more edits than there is room for."""
        many, count = self.nobody + 1, len(edits.ids)
        if count > self._edits:
            raise ValueError(f"{count} edits of logits, where there is room for {self._edits}")
        indices = self._edits_at + edits.slot * self._edits + np.arange(count)
        parts = edits.ids, edits.values.view(np.int32), edits.until
        return [(indices + part * many * self._edits, value) for part, value in enumerate(parts)]

    def _banned(self, slot: int, bans: Bans) -> list[tuple[np.ndarray, np.ndarray]]:
        """All but how many there are. Raises ValueError for more than there is room for."""
        if len(bans.ends) > SEQUENCES or len(bans.ids) > MOST_BAD_IDS:
            raise ValueError(f"no room for {len(bans.ends)} sequences of {len(bans.ids)} ids")
        begin = self._bans_at + slot * BANS
        ends_at = begin + BAN_HEAD + LONGEST_BAD
        longest = np.diff(bans.ends, prepend=0).max()
        head = np.array((bans.begin, bans.known, longest), dtype=np.int32)
        recent = np.arange(bans.known - len(bans.recent), bans.known) % LONGEST_BAD
        ends, ids = np.concatenate(([0], bans.ends)), bans.ids
        return [
            (begin + 1 + np.arange(len(head)), head),
            (begin + BAN_HEAD + recent, bans.recent),
            (ends_at + np.arange(len(ends)), ends),
            (ends_at + SEQUENCES + 1 + np.arange(len(ids)), ids),
        ]


def fields_by_name(words: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """Views [count] into the words of `count` slots' or rows' fields."""
    views: dict[str, torch.Tensor] = {}
    begin = 0
    for field in ORDER:
        size = np.dtype(field.dtype).itemsize
        part = words[begin : begin + count * size // 4]
        views[field.name] = part.view(_torch_dtype(field.dtype))
        begin += len(part)
    return views


def _torch_dtype(dtype: type) -> torch.dtype:
    kind = np.dtype(dtype)
    return torch.float32 if kind == np.float32 else TORCH[kind.itemsize]

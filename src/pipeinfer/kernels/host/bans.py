"""Sequences of ids that an output must not have, one row at a time in NumPy.

See kernels/tables.py for what lies there. Knows a row of logits and a slot's words.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.kernels.tables import BAD_WORDS_HEADER, SlotBadWords


def apply_bad_words(
    logits: torch.Tensor, slot: int, position: int, bans: SlotBadWords, first_id: int, note: bool
) -> None:
    """Changes logits [ids], those from `first_id` on, of what is sampled at `position`.

    note: the last token is the one before that position, if it was sampled in this slot.
    """
    words = bans.words.numpy()[slot]
    count, begin, known, _ = words[:BAD_WORDS_HEADER].tolist()
    recent = words[BAD_WORDS_HEADER:][: bans.history]
    if note and position > known:
        recent[(position - 1) % bans.history] = int(bans.last_token[slot])
    ends = words[BAD_WORDS_HEADER + bans.history :][: count + 1]
    ids = words[BAD_WORDS_HEADER + bans.history + bans.max_sequences + 1 :]
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        before, last = ids[first : end - 1], int(ids[end - 1]) - first_id
        places = np.arange(position - len(before), position)
        held = 0 <= last < len(logits) and len(before) <= position - begin
        if held and np.array_equal(recent[places % bans.history], before):
            logits[last] = float("-inf")

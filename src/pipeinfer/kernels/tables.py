"""What lies on a device of a step and by slot: what the kernels around a model read and write.

Knows rows, slots and pages as tensors; no request, no kernel and no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOBODY = -(2**31)  # in Rows.entries: the row has no entry
NOWHERE = -1  # in Expanded.places: keep nothing of this token
NO_KEY = -(2**63)  # in a record of scores: no id is there
GREEDY_BELOW = 1e-5  # such a temperature is greedy, as in vLLM


@dataclass(frozen=True)
class Rows:
    """A step's rows, int32: slots, starts, counts [R], and tokens [T or more], each where it stands
    in Expanded, -1 for last_token[slot]. A row of count 0 is nobody's: it must have the last slot
    and start 0.

    entries [R]: which of the S entries for sampling is the row's; -1 - e: entry e is nobody's;
    NOBODY: none. Together they name each entry once.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    entries: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class BySlot:
    """What lies on the device by slot; the last slot is nobody's.

    table: int32 [slots, P]. fields: int32 words, field after field, `wide` of two words a slot and
    then `narrow` of one. last_token: int64 [slots].
    """

    table: torch.Tensor
    fields: torch.Tensor
    last_token: torch.Tensor
    wide: int
    narrow: int


# In front of a slot's words in BansBySlot: how many sequences there are, where the output begins,
# how many tokens were known when its request was admitted, and the ids of the longest sequence.
BAN_HEAD = 4


@dataclass(frozen=True)
class BansBySlot:
    """Sequences of ids that a slot's output must not have. words: int32 [slots, n], in each

    | BAN_HEAD | recent ids | 0, ends of sequences | ids, sequence after sequence |

    recent: how many of the output's last ids are kept, a power of two; the one at position p is at
    p % recent. sequences: as many have room. last_token: int64 [slots], as BySlot's.
    """

    words: torch.Tensor
    recent: int
    sequences: int
    last_token: torch.Tensor


@dataclass(frozen=True)
class EditsBySlot:
    """int32. counts: [slots], how many edits a slot has; below 0, as many as it would be above, and
    no other id is sampled. words: [3, slots, most]: ids, which differ in a slot; the bits of the
    float32 that is added to the id's logit; and the position before which the id is not sampled.
    """

    counts: torch.Tensor
    words: torch.Tensor
    bans: BansBySlot


@dataclass(frozen=True)
class Expanded:
    """What a step's kernels index with; R rows, T tokens, S entries and N pages are capacities.

    positions, places (page * page_size + offset), ids: int64 [T]. offsets: int32 [R + 1], where a
    row's tokens begin; prompt_offsets: int32 [prompts + 1], the same of the rows behind the
    decodes, less `base`. lengths, last_page: int32 [R], tokens after the step, and in the last
    page. begins: int32 [R + 1], where a row's pages begin in `listed` int32 [N], row after row, or
    where that has no room, in the page table of all slots. gathered: int32 [n, P], pages of the
    last n rows. last: int64 [S], the token that an entry samples behind; write_slots,
    sample_positions: int64 [S]; fields: as BySlot's, by entry.
    """

    positions: torch.Tensor
    places: torch.Tensor
    ids: torch.Tensor
    offsets: torch.Tensor
    prompt_offsets: torch.Tensor
    lengths: torch.Tensor
    last_page: torch.Tensor
    begins: torch.Tensor
    listed: torch.Tensor
    gathered: torch.Tensor
    last: torch.Tensor
    write_slots: torch.Tensor
    sample_positions: torch.Tensor
    fields: torch.Tensor

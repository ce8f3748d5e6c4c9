"""From a step's rows to what is indexed by them, row by row: the definition of Kernels.expand."""

from __future__ import annotations

import torch

from pipeinfer.kernels.tables import NOBODY, NOWHERE, BySlot, Expanded, Rows


def expand_reference(
    rows: Rows, held: BySlot, page_size: int, padding: int, base: int, out: Expanded
) -> None:
    """See kernels/interface.py."""
    prompts, nobody = len(out.prompt_offsets) - 1, len(held.table) - 1
    total, at, at_page = len(rows.counts), 0, 0
    for tensor, value in ((out.positions, 0), (out.places, NOWHERE), (out.ids, 0)):
        tensor[:] = value
    for row, known in enumerate(rows.counts.tolist()):
        slot, start = int(rows.slots[row]), int(rows.starts[row]) if known else 0
        count = known or padding
        length = start + count
        used = -(-length // page_size)
        pages = held.table[slot, :used]
        span = slice(at, at + known)
        position = out.positions[span] = torch.arange(start, start + known).to(pages.device)
        out.places[span] = pages[position // page_size].long() * page_size + position % page_size
        ids = rows.tokens[span].long()
        out.ids[span] = torch.where(ids < 0, held.last_token[slot], ids)
        out.offsets[row], out.lengths[row] = at, length
        out.last_page[row] = length - (used - 1) * page_size
        if row >= total - prompts:
            out.prompt_offsets[row - (total - prompts)] = at - base
        out.begins[row] = at_page if len(out.listed) else slot * held.table.shape[1]
        if len(out.listed):
            out.listed[at_page : at_page + used] = pages
        if row >= total - len(out.gathered):
            out.gathered[row - (total - len(out.gathered)), :used] = pages
        entry = int(rows.entries[row])
        if entry != NOBODY:
            real, entry = entry >= 0, entry if entry >= 0 else -1 - entry
            out.last[entry] = at + count - 1 if real else 0
            out.write_slots[entry] = slot if real else nobody
            out.sample_positions[entry] = length if real else 0
            words = _words(held, entry, len(out.last))
            out.fields[words] = held.fields[_words(held, slot if real else nobody, len(held.table))]
        at, at_page = at + count, at_page + used
    last = at, at - base, at_page if len(out.listed) else 0
    out.offsets[total], out.prompt_offsets[prompts], out.begins[total] = last


def _words(held: BySlot, index: int, many: int) -> list[int]:
    """Where the fields of one of `many` slots or entries stand."""
    wide = [2 * (field * many + index) + word for field in range(held.wide) for word in range(2)]
    return wide + [(2 * held.wide + field) * many + index for field in range(held.narrow)]

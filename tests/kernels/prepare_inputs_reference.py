"""A step's rows made into inputs, row by row: the definition of Kernels.prepare_inputs."""

from __future__ import annotations

import torch

from pipeinfer.kernels.interface import NO_KV_LOCATION, NO_LOGITS, DeviceStep, SlotTables


def prepare_inputs_reference(step: DeviceStep, held: SlotTables, page_size: int) -> None:
    """See kernels/interface.py."""
    prefills, padding_slot = step.shape.num_prefills, len(held.page_table) - 1
    total, at, at_page, base = len(step.counts), 0, 0, step.prefill_query_base
    for tensor, value in (
        (step.positions, 0),
        (step.slot_mapping, NO_KV_LOCATION),
        (step.input_ids, 0),
    ):
        tensor[:] = value
    for row, known in enumerate(step.counts.tolist()):
        slot, start = int(step.slots[row]), int(step.starts[row]) if known else 0
        count = known or step.padding_row_tokens
        length = start + count
        used = -(-length // page_size)
        pages = held.page_table[slot, :used]
        span = slice(at, at + known)
        position = step.positions[span] = torch.arange(start, start + known).to(pages.device)
        place = pages[position // page_size].long() * page_size + position % page_size
        step.slot_mapping[span] = place
        ids = step.tokens[span].long()
        step.input_ids[span] = torch.where(ids < 0, held.last_token[slot], ids)
        step.qo_indptr[row], step.seq_lens[row] = at, length
        step.last_page_len[row] = length - (used - 1) * page_size
        if row >= total - prefills:
            step.prefill_qo_indptr[row - (total - prefills)] = at - base
        step.kv_indptr[row] = at_page if step.lists_pages else slot * held.page_table.shape[1]
        if step.lists_pages:
            step.kv_indices[at_page : at_page + used] = pages
        if row >= total - len(step.row_page_table):
            step.row_page_table[row - (total - len(step.row_page_table)), :used] = pages
        entry = int(step.logits_rows[row])
        if entry != NO_LOGITS:
            real, entry = entry >= 0, entry if entry >= 0 else -1 - entry
            step.logits_indices[entry] = at + count - 1 if real else 0
            step.write_slots[entry] = slot if real else padding_slot
            step.sample_positions[entry] = length if real else 0
            words = _words(held, entry, step.num_logits)
            source = _words(held, slot if real else padding_slot, len(held.page_table))
            step.sampling_words[words] = held.sampling_words[source]
        at, at_page = at + count, at_page + used
    last = at, at - base, at_page if step.lists_pages else 0
    step.qo_indptr[total], step.prefill_qo_indptr[prefills], step.kv_indptr[total] = last


def _words(held: SlotTables, index: int, many: int) -> list[int]:
    """Where the fields of one of `many` slots or entries stand."""
    wide = [
        2 * (field * many + index) + word for field in range(held.num_wide) for word in range(2)
    ]
    return wide + [(2 * held.num_wide + field) * many + index for field in range(held.num_narrow)]

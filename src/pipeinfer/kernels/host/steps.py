"""A step's rows in NumPy: what changes in their slots, and everything that is indexed by them.

See kernels/interface.py for what the functions do. Nothing loops over rows, except over those with
edits of logits. Knows rows, slots and pages as tensors on the host.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.kernels.host.bans import apply_bad_words
from pipeinfer.kernels.tables import NO_LOGITS, NO_SLOT, DeviceStep, SlotLogitBias, SlotTables


def scatter_words(pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor) -> None:
    """See interface.py, here and below."""
    many = int(count)
    if many:
        changes = pairs.numpy()[: 2 * many]
        words.numpy()[changes[0::2]] = changes[1::2]


def prepare_inputs(step: DeviceStep, held: SlotTables, page_size: int) -> None:
    counts, slots = step.counts.numpy(), step.slots.numpy()
    starts, sizes = step.starts.numpy(), counts
    if not counts.all():
        starts, sizes = (
            np.where(counts, starts, 0),
            np.where(counts, counts, step.padding_row_tokens),
        )
    lengths = starts + sizes
    firsts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(sizes, out=firsts[1:])
    _tokens(step, held, page_size, (slots, starts, counts, sizes, firsts))
    _rows(step, held, page_size, slots, lengths, firsts)
    _logits_rows(step, held, slots, lengths, firsts)


def _tokens(
    step: DeviceStep, held: SlotTables, page_size: int, by_row: tuple[np.ndarray, ...]
) -> None:
    """What stands once for each token; those past the last row's, and padding, have no slot."""
    slots, starts, counts, sizes, firsts = by_row
    many, row, index = int(firsts[-1]), None, None
    slot, position = slots, starts  # of one token each
    if many != len(slots) or sizes is not counts:
        row = np.repeat(np.arange(len(slots)), sizes)
        index = np.arange(many) - firsts[row]
        slot, position = slots[row], starts[row] + index
    page = held.page_table.numpy()[slot, position // page_size].astype(np.int64)
    place = page * page_size + position % page_size
    ids = step.tokens.numpy()[:many].astype(np.int64)
    unknown = np.flatnonzero(ids < 0)
    ids[unknown] = held.last_token.numpy()[slot[unknown]]
    if sizes is not counts and index is not None:
        padding = index >= counts[row]
        position[padding], place[padding], ids[padding] = 0, NO_SLOT, 0
    for target, values, filler in (
        (step.positions, position, 0), (step.slot_mapping, place, NO_SLOT), (step.input_ids, ids, 0)
    ):  # fmt: skip
        target = target.numpy()
        target[:many], target[many:] = values, filler


def _rows(
    step: DeviceStep, held: SlotTables, page_size: int, slots: np.ndarray, lengths: np.ndarray,
    firsts: np.ndarray,
) -> None:  # fmt: skip
    """What stands once for each row, and pages row after row."""
    width, used = held.page_table.shape[1], -(-lengths // page_size)
    step.qo_indptr.numpy()[:] = firsts
    step.prefill_qo_indptr.numpy()[:] = firsts[step.shape.decodes :] - step.prefill_query_base
    step.seq_lens.numpy()[:] = lengths
    step.last_page_len.numpy()[:] = lengths - (used - 1) * page_size
    begins, table = step.kv_indptr.numpy(), held.page_table.numpy()
    if step.lists_pages:
        begins[0] = 0
        np.cumsum(used, out=begins[1:])
        row = np.repeat(np.arange(len(slots)), used)
        listed = table[slots[row], np.arange(len(row)) - begins[row]]
        shown = min(len(listed), len(step.kv_indices))
        step.kv_indices.numpy()[:shown] = listed[:shown]
    else:
        begins[:-1], begins[-1] = slots * width, 0
    if len(step.block_table):
        some = slice(len(slots) - len(step.block_table), None)
        shown = np.arange(width) < used[some, None]
        np.copyto(step.block_table.numpy(), table[slots[some]], where=shown)


def _logits_rows(
    step: DeviceStep, held: SlotTables, slots: np.ndarray, lengths: np.ndarray, firsts: np.ndarray
) -> None:
    """What stands once for each row of logits."""
    logits_rows = step.logits_rows.numpy()
    rows = np.flatnonzero(logits_rows != NO_LOGITS)
    entry = logits_rows[rows]
    of = np.empty(len(rows), dtype=np.int64)  # of each row of logits, its row
    of[np.where(entry >= 0, entry, -1 - entry)] = rows
    slot, token, position = slots[of], firsts[of + 1] - 1, lengths[of]
    if entry.min(initial=0) < 0:
        padding = logits_rows[of] < 0
        slot = np.where(padding, len(held.page_table) - 1, slot)
        position = np.where(padding, 0, position)
        token[padding] = 0
    step.logits_indices.numpy()[:] = token
    step.write_slots.numpy()[:] = slot
    step.sample_positions.numpy()[:] = position
    theirs, mine, wide = held.sampling_words.numpy(), step.sampling_words.numpy(), 2 * held.num_wide
    from_here, to_here = wide * len(held.page_table), wide * len(of)
    for source, target, shape in (
        (theirs[:from_here], mine[:to_here], (held.num_wide, -1, 2)),
        (theirs[from_here:], mine[to_here:], (held.num_narrow, -1)),
    ):
        target.reshape(shape)[:] = source.reshape(shape)[:, slot]


def apply_logit_bias(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, edits: SlotLogitBias,
    first_id: int = 0, values: bool = False,
) -> None:  # fmt: skip
    slot = slots.numpy()
    counts, words = edits.counts.numpy()[slot], edits.words.numpy()
    for row in np.flatnonzero(counts).tolist():
        ids, bits, until = words[:, slot[row], : abs(counts[row])]
        column = ids.astype(np.int64) - first_id
        held, never = (column >= 0) & (column < logits.shape[1]), until > int(positions[row])
        there = torch.from_numpy(column[held])
        left = logits[row, there]
        if values:
            left += torch.from_numpy(bits.view(np.float32)[held])
        if counts[row] < 0:
            logits[row] = float("-inf")
        logits[row, there] = left
        logits[row, torch.from_numpy(column[held & never])] = float("-inf")
    banned = edits.bad_words.words.numpy()[slot, 0]
    for row in np.flatnonzero(banned).tolist():
        apply_bad_words(
            logits[row], int(slot[row]), int(positions[row]), edits.bad_words, first_id, not values
        )


def apply_token_bitmask(
    logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first_id: int = 0
) -> None:
    width = logits.shape[1]
    for row, own in zip(rows.tolist(), words.numpy(), strict=True):
        bits = np.unpackbits(own.view(np.uint8), bitorder="little")[first_id : first_id + width]
        forbidden = torch.from_numpy(bits == 0)
        logits[row, : len(bits)].masked_fill_(forbidden, float("-inf"))
        logits[row, len(bits) :] = float("-inf")

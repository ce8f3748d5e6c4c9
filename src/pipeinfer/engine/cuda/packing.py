"""Fills the arrays of a step: what each token and each row is to a kernel, in plain NumPy.

This is the hot path of the engine's host: nothing here loops over rows. Knows no device and no
kernel. Padding rows of a CUDA graph read the dummy page, store nothing and own the dummy slot.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.attention.step_index import positions as step_positions
from pipeinfer.attention.step_index import store_places
from pipeinfer.engine.fields import FIELDS
from pipeinfer.steps.step import Step

Views = dict[str, np.ndarray]
NOWHERE = -1  # in `store`: keep nothing of this token
# Of rows that do not sample; who is written to depends on the runner.
FILLERS = {field.name: field.filler for field in FIELDS} | {"sample_positions": 0}


def pack_decodes(
    step: Step, views: Views, page_size: int, dummy_slot: int, table: bool
) -> tuple[int, np.ndarray]:
    """A step of decode rows into views for B >= R rows, the longest first; all B sample.

    `table`: fill the page table [B, P] instead of `indices`. Returns how many page indices there
    are, and int64 [R] at which of the B rows each row of the step stands.
    """
    rows = len(step.slots)
    # The longest rows begin first, so that no long one is left over when the others have ended.
    order = np.argsort(step.starts, kind="stable")[::-1]
    starts, slots, pages = step.starts[order], step.slots[order], step.pages[order]
    page, offset = np.divmod(starts, page_size)
    views["q_indptr"][:] = np.arange(len(views["q_indptr"]))
    _padded(views["tokens"], step.tokens[order], 0)
    _padded(views["token_slots"], slots, dummy_slot)
    _padded(views["positions"], starts, 0)
    _padded(views["store"], pages[np.arange(rows), page] * page_size + offset, NOWHERE)
    _padded(views["lengths"], starts + 1, 1)
    _padded(views["last_page"], offset + 1, 1)
    place = np.empty(rows, dtype=np.int64)
    place[order] = np.arange(rows)
    _sampling_at(step, views, place[step.samples], dummy_slot)
    held = page + 1
    size = len(views["kv_indptr"]) - 1
    used = _page_indptr(views["kv_indptr"], held, size)
    if table:
        by_row = views["table"].reshape(size, -1)
        by_row[:rows, : pages.shape[1]] = pages
        by_row[rows:, 0] = 0
        return 0, place
    _indices(views["indices"], pages, held, used)
    return used, place


def pack_mixed(step: Step, views: Views, page_size: int, dummy_slot: int, decode_rows: int) -> int:
    """Any step into views that have room for more of everything, the longest decodes first.

    Of the views' rows, `decode_rows` are for decodes and the others for prompts; those left over
    have no keys. The tokens of real rows stand side by side, what is left over belongs to the dummy
    slot. Sampling rows come first, in the step's order. Returns how many page indices there are: of
    decode rows only.
    """
    decodes, page = step.decodes, step.starts // page_size
    order = np.arange(len(step.slots))
    order[:decodes] = np.argsort(step.starts[:decodes], kind="stable")[::-1]
    starts, counts, pages = step.starts[order], step.counts[order], step.pages[order]
    held = page[order][:decodes] + 1
    ends = np.cumsum(counts, dtype=np.int64)
    _tokens_of(views, step, order, ends, page_size, dummy_slot)
    lengths, prompts = starts + counts, len(order) - decodes
    _padded(views["lengths"][:decode_rows], lengths[:decodes], 0)
    _padded(views["lengths"][decode_rows:], lengths[decodes:], 0)
    _padded(views["last_page"], (lengths[:decodes] - 1) % page_size + 1, 1)
    views["prefill_indptr"][0] = decodes
    views["prefill_indptr"][1 : prompts + 1] = ends[decodes:]
    views["prefill_indptr"][prompts + 1 :] = ends[-1] if len(ends) else 0
    if decode_rows:
        views["q_indptr"][: decode_rows + 1] = np.arange(decode_rows + 1)
    else:
        views["q_indptr"][:] = views["prefill_indptr"][: len(views["q_indptr"])]
    table = views["table"].reshape(len(views["lengths"]) - decode_rows, -1)
    table[:prompts, : pages.shape[1]] = pages[decodes:]
    _sampling_at(step, views, np.arange(len(step.sampling.positions)), dummy_slot)
    stands = np.empty_like(order)
    stands[order] = np.arange(len(order))
    _padded(views["last"], ends[stands[step.samples]] - 1, 0)
    used = _page_indptr(views["kv_indptr"], held, decode_rows)
    _indices(views["indices"], pages[:decodes], held, used)
    return used


def _tokens_of(
    views: Views, step: Step, order: np.ndarray, ends: np.ndarray, page_size: int, dummy_slot: int
) -> None:
    """What is indexed by token, for rows in `order`, of which the decodes come first."""
    counts = step.counts[order]
    rows = np.repeat(order, counts)
    positions = np.arange(len(rows)) + np.repeat(step.starts[order] - (ends - counts), counts)
    page, offset = np.divmod(positions, page_size)
    tokens = step.tokens.copy()
    tokens[: step.decodes] = step.tokens[order[: step.decodes]]
    _padded(views["tokens"], tokens, 0)
    _padded(views["token_slots"], step.slots[rows], dummy_slot)
    _padded(views["positions"], positions, 0)
    _padded(views["store"], step.pages[rows, page] * page_size + offset, NOWHERE)


def _page_indptr(indptr: np.ndarray, held: np.ndarray, rows: int) -> int:
    """Where the pages of `rows` decode rows begin, one dummy page for each that is not real.

    Returns how many pages that is.
    """
    real = len(held)
    indptr[0] = 0
    np.cumsum(held, out=indptr[1 : real + 1])
    total = int(indptr[real])
    used = total + rows - real
    indptr[real + 1 : rows + 1] = np.arange(total + 1, used + 1)
    indptr[rows + 1 :] = used
    return used


def _indices(indices: np.ndarray, pages: np.ndarray, held: np.ndarray, used: int) -> None:
    """The pages of real rows one after another, then dummies up to `used`."""
    flat = flat_pages(pages, held)
    indices[: len(flat)] = flat
    indices[len(flat) : used] = 0


def flat_pages(pages: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The first held[r] of pages[r], row after row."""
    return pages[np.arange(pages.shape[1]) < held[:, None]]


def _padded(view: np.ndarray, values: np.ndarray, filler: int) -> None:
    view[: len(values)] = values
    view[len(values) :] = filler


def _sampling_at(step: Step, views: Views, places: np.ndarray, dummy_slot: int) -> None:
    """Sampling parameters at `places`; rows that do not sample write to the dummy slot."""
    for name, values in _sampling(step).items():
        if len(places) < len(views[name]):
            views[name][:] = dummy_slot if name == "write_slots" else FILLERS[name]
        views[name][places] = values


def pack_rows(step: Step, views: Views, page_size: int) -> int:
    """Any step into views of exactly its sizes. Returns how many page indices there are.

    Where the views have "starts", the device derives from the rows what the others hold.
    """
    counts = step.counts
    lengths = step.starts + counts
    views["tokens"][:] = step.tokens
    views["lengths"][:] = lengths
    views["last_page"][:] = (lengths - 1) % page_size + 1
    ends = views["q_indptr"]
    ends[0] = 0
    np.cumsum(counts, out=ends[1:])
    prefills = len(counts) - step.decodes
    views["prefill_indptr"][: prefills + 1] = ends[step.decodes :] - ends[step.decodes]
    held = (lengths + page_size - 1) // page_size
    views["kv_indptr"][0] = 0
    np.cumsum(held, out=views["kv_indptr"][1:])
    views["table"][:] = step.pages.reshape(-1)
    for name, values in _sampling(step).items():
        views[name][:] = values
    views["last"][:] = ends[1:][step.samples] - 1
    if "starts" in views:
        views["starts"][:], views["counts"][:], views["slots"][:] = step.starts, counts, step.slots
    else:
        _by_token(step, views, page_size, held)
    return int(views["kv_indptr"][-1])


def _by_token(step: Step, views: Views, page_size: int, held: np.ndarray) -> None:
    """What kernels/expand.py derives otherwise."""
    views["token_slots"][:] = np.repeat(step.slots, step.counts)
    positions = views["positions"][:] = step_positions(step)
    views["store"][:] = store_places(step, positions, page_size)
    flat = flat_pages(step.pages, held)
    views["indices"][: len(flat)] = flat


def _sampling(step: Step) -> dict[str, np.ndarray]:
    """By name, what samplers are handed of the S rows that sample."""
    slots, sampling = step.slots[step.samples], step.sampling
    return {**sampling.fields, "sample_positions": sampling.positions, "write_slots": slots}

"""Index expansion against the step's own definition: cases for interpreter and GPU."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from kernels.triton_cases import DEVICE
from pipeinfer.attention.step_index import positions, store_places
from pipeinfer.kernels import expand as module
from pipeinfer.kernels.expand import allocate, expand, expand_reference
from pipeinfer.steps.step import LAST_TOKEN, SamplingRows, Step

FULL = -7  # what lies in the buffers before, to see what was written


def step(counts: list[int], starts: list[int], page_size: int, seed: int = 0) -> Step:
    choose = np.random.default_rng(seed)
    rows, tokens = len(counts), sum(counts)
    longest = max((s + c for s, c in zip(starts, counts, strict=True)), default=1)
    width = -(-longest // page_size) + 2
    pages = choose.permutation(np.arange(1, rows * width + 1)).reshape(rows, width)
    ids = choose.integers(0, 50_000, tokens)
    first = np.cumsum(counts) - counts
    ids[first[np.array(counts) == 1]] = LAST_TOKEN
    nothing = np.empty(0)
    return Step(
        epoch=0,
        number=0,
        decodes=0,
        slots=choose.permutation(rows + 4)[:rows].astype(np.int32),
        starts=np.array(starts, dtype=np.int32),
        counts=np.array(counts, dtype=np.int32),
        samples=np.ones(rows, dtype=bool),
        tokens=ids.astype(np.int32),
        pages=pages.astype(np.int32),
        sampling=SamplingRows({}, nothing, nothing),
    )


def arguments(step: Step):
    """What expand takes of a step, and last_token."""
    names = ("pages", "starts", "counts", "slots", "tokens")
    arrays = [torch.from_numpy(getattr(step, name)).to(DEVICE) for name in names]
    return [*arrays, torch.arange(1000, 1000 + len(step.slots) + 4, device=DEVICE)]


def run(function, given, page_size: int, rows: int, tokens: int, indices: int):
    out = allocate(rows, tokens, indices, DEVICE)
    for field in fields(out):
        getattr(out, field.name).fill_(FULL)
    function(*given, page_size, out)
    return out


def assert_same(mine, theirs):
    for field in fields(mine):
        got, expected = getattr(mine, field.name), getattr(theirs, field.name)
        assert torch.equal(got, expected), field.name


CASES = {
    "decodes": ([1] * 9, [0, 3, 4, 7, 8, 15, 16, 100, 31]),
    "one prompt": ([37], [0]),
    "mixed": ([1, 1, 5, 16, 33, 2], [12, 63, 0, 16, 7, 30]),
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_everything_is_as_the_step_defines_it(case, page_size):
    counts, starts = CASES[case]
    given = step(counts, starts, page_size)
    rows, tokens = len(counts), sum(counts)
    used = -(-(given.starts + given.counts) // page_size)
    sizes = (page_size, rows, tokens, int(used.sum()))
    out = run(expand, arguments(given), *sizes)
    assert_same(out, run(expand_reference, arguments(given), *sizes))
    at = positions(given)
    assert np.array_equal(out.positions.cpu(), at)
    assert np.array_equal(out.places.cpu(), store_places(given, at, page_size))
    assert np.array_equal(out.seq_lens.cpu(), given.starts + given.counts)
    row = np.repeat(np.arange(rows), given.counts)
    expected = np.where(given.tokens == LAST_TOKEN, 1000 + given.slots[row], given.tokens)
    assert np.array_equal(out.ids.cpu(), expected)
    pages = [given.pages[r, :n] for r, n in enumerate(used)]
    assert np.array_equal(out.page_indices.cpu(), np.concatenate(pages))


def test_padding_rows_become_one_token_in_the_dummy_page_and_read_nothing():
    page_size, real = 4, 5
    given = step([1] * real, [0, 9, 3, 4, 11], page_size)
    pages, starts, counts, slots, tokens, last_token = arguments(given)
    garbage = 2**30  # of an earlier step: an index that would fault if it were used

    def padded(tensor, value):
        return torch.cat((tensor, tensor.new_full((3, *tensor.shape[1:]), value)))

    widened = [
        padded(pages, garbage), padded(starts, garbage), padded(counts, 0), padded(slots, garbage),
        padded(tokens, garbage), last_token,
    ]  # fmt: skip
    out = run(expand, widened, page_size, rows=8, tokens=10, indices=40)
    alone = run(expand, arguments(given), page_size, rows=real, tokens=real, indices=40)
    assert_same(run(expand_reference, widened, page_size, rows=8, tokens=10, indices=40), out)
    assert torch.equal(out.ids[:real], alone.ids)
    for tensor in (out.positions, out.places, out.ids):
        assert tensor[real:].tolist() == [0] * 5
    assert out.seq_lens[real:].tolist() == out.last_page_len[real:].tolist() == [1, 1, 1]
    at = int(alone.page_offsets[real])
    assert out.page_offsets[real:].tolist() == [at, at + 1, at + 2, at + 3]
    assert out.page_indices[at : at + 3].tolist() == [0, 0, 0]
    assert (out.page_indices[at + 3 :] == FULL).all()


def test_a_row_longer_than_a_program_is_written_whole(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)
    monkeypatch.setattr(module, "MOST_PROGRAMS", 2)
    given = step([90, 1, 130], [5, 70, 40], 2)
    sizes = (2, 3, 240, 300)
    assert_same(
        run(expand, arguments(given), *sizes), run(expand_reference, arguments(given), *sizes)
    )


def test_indices_never_leave_a_buffer_that_is_too_small():
    given = step([1, 1, 1], [30, 30, 30], 4)
    out = run(expand, arguments(given), 4, rows=3, tokens=3, indices=64)
    backing = torch.full((64,), FULL, dtype=torch.int32, device=DEVICE)
    small = allocate(3, 3, 0, DEVICE)
    object.__setattr__(small, "page_indices", backing[:10])
    expand(*arguments(given), 4, small)
    assert torch.equal(backing[:10], out.page_indices[:10])
    assert (backing[10:] == FULL).all()

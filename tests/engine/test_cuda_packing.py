"""The arrays that a GPU's kernels index with, against the definition, row by row. Needs no GPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.engine.cuda import packing
from pipeinfer.engine.cuda.artificial import deep_decodes
from pipeinfer.engine.cuda.graphs import DecodeGraphs, Frame, ladder
from pipeinfer.engine.cuda.layout import Layout, Sizes
from pipeinfer.engine.cuda.mixed_graphs import MixedGraphs, MixedSize
from pipeinfer.engine.cuda.mixed_graphs import ladder as mixed_ladder
from pipeinfer.engine.cuda.sampling import restricted as restricts
from pipeinfer.engine.cuda.step_times import amid_prompts
from pipeinfer.engine.fields import FIELDS
from pipeinfer.steps.step import LAST_TOKEN, SamplingRows, Step

DUMMY_SLOT = 99


def frame(page_size, table=False):
    return Frame(96, page_size, table, DUMMY_SLOT, torch.device("cpu"))


def make_step(starts, counts, samples, page_size, seed=0) -> Step:
    random = np.random.default_rng(seed)
    rows = len(starts)
    starts, counts = (np.array(values, dtype=np.int32) for values in (starts, counts))
    samples = np.array(samples, dtype=bool)
    width = int(-(-(starts + counts).max() // page_size))
    wanted = int(samples.sum())
    positions = (starts + counts)[samples].astype(np.int64)
    values = {
        field.name: random.integers(0, 2**64, wanted, dtype=np.uint64)
        if field.dtype is np.uint64
        else (9 * random.random(wanted)).astype(field.dtype)
        for field in FIELDS
    }
    sampling = SamplingRows(values, positions, np.zeros((0, 2), dtype=np.int64))
    return Step(
        0, 0, int((counts == 1).sum()), random.permutation(rows).astype(np.int32), starts, counts,
        samples, random.integers(LAST_TOKEN, 50, int(counts.sum())).astype(np.int32),
        random.permutation(np.arange(1, rows * width + 1)).reshape(rows, width).astype(np.int32),
        sampling,
    )  # fmt: skip


decode_rows = st.lists(st.tuples(st.integers(0, 70), st.booleans()), min_size=1, max_size=9)


@given(decode_rows, st.integers(0, 4), st.sampled_from([1, 16]), st.booleans())
def test_packed_decodes_say_of_every_row_what_the_step_says(rows, padding, page_size, table):
    starts, samples = [row[0] for row in rows], [row[1] for row in rows]
    step = make_step(starts, [1] * len(rows), samples, page_size)
    size = len(rows) + padding
    layout = DecodeGraphs((size,), frame(page_size, table)).layout(size)
    buffer = np.full(layout.words, -7, dtype=np.int32)  # what another step left there
    views = layout.host(buffer)
    used, place = packing.pack_decodes(step, views, page_size, DUMMY_SLOT, table)
    assert views["token_slots"][place].tolist() == step.slots.tolist()
    assert views["q_indptr"].tolist() == list(range(size + 1))
    places = place[step.samples]
    by_slot = {int(slot): row for row, slot in enumerate(step.slots)}
    assert sorted(views["lengths"][: len(rows)].tolist(), reverse=True) == [
        *views["lengths"][: len(rows)]
    ]
    for at in range(size):
        slot, row = int(views["token_slots"][at]), by_slot.get(int(views["token_slots"][at]))
        assert (row is None) == (slot == DUMMY_SLOT) == (at >= len(rows))
        start = 0 if row is None else int(step.starts[row])
        held = 1 if row is None else start // page_size + 1
        pages = [0] if row is None else step.pages[row, :held].tolist()
        assert views["positions"][at] == start
        assert views["lengths"][at] == start + 1
        assert views["last_page"][at] == start % page_size + 1
        place = packing.NOWHERE if row is None else pages[-1] * page_size + start % page_size
        assert views["store"][at] == place
        assert views["tokens"][at] == (0 if row is None else step.tokens[row])
        if table:
            assert views["table"].reshape(size, -1)[at, :held].tolist() == pages
        else:
            begin, end = views["kv_indptr"][at : at + 2]
            assert views["indices"][begin:end].tolist() == pages
    assert used == (0 if table else views["kv_indptr"][-1])
    check_sampling(step, views, places, size)


def check_sampling(step, views, places, size):
    sampling = step.sampling
    assert views["write_slots"][places].tolist() == step.slots[step.samples].tolist()
    assert views["sample_positions"][places].tolist() == sampling.positions.tolist()
    others = np.setdiff1d(np.arange(size), places)
    assert (views["write_slots"][others] == DUMMY_SLOT).all()
    for field in FIELDS:
        assert views[field.name].dtype == field.dtype
        assert views[field.name][places].tolist() == sampling.fields[field.name].tolist()
        assert (views[field.name][others] == field.filler).all()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), max_size=8),
    st.sampled_from([1, 16, 64]),
)
def test_packed_rows_say_of_every_token_what_the_step_says(rows, page_size):
    rows = sorted(rows, key=lambda row: row[1] != 1) or [(0, 1, True)]
    starts, counts, samples = zip(*rows, strict=True)
    step = make_step(starts, counts, samples, page_size)
    sizes = Sizes(len(rows), len(step.tokens), sum(samples), step.pages.shape[1], step.pages.size)
    layout = Layout(sizes)
    views = layout.host(np.full(layout.words, -7, dtype=np.int32))
    used = packing.pack_rows(step, views, page_size)
    at = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert views["q_indptr"][row] == at
        for position in range(start, start + count):
            page = step.pages[row, position // page_size]
            assert views["store"][at] == page * page_size + position % page_size
            assert views["positions"][at] == position
            assert views["token_slots"][at] == step.slots[row]
            at += 1
        begin, end = views["kv_indptr"][row : row + 2]
        held = -(-(start + count) // page_size)
        assert views["indices"][begin:end].tolist() == step.pages[row, :held].tolist()
        assert views["last_page"][row] == (start + count) - (held - 1) * page_size
        assert views["lengths"][row] == start + count
    prefills = len(rows) - step.decodes
    relative = views["q_indptr"][step.decodes :] - step.decodes
    assert views["prefill_indptr"][: prefills + 1].tolist() == relative.tolist()
    assert used == views["kv_indptr"][-1]
    ends = np.cumsum(counts)[list(samples)] - 1
    assert views["last"].tolist() == ends.tolist()


mixed_rows = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), min_size=1, max_size=8
)


@given(mixed_rows, st.tuples(*[st.integers(0, 5)] * 3), st.sampled_from([1, 16]))
def test_a_packed_mixed_step_says_of_every_row_what_the_step_says(rows, spare, page_size):
    rows = sorted(rows, key=lambda row: row[1] != 1)
    step = make_step(*zip(*rows, strict=True), page_size)
    prompts = len(rows) - step.decodes
    room = max(prompts + spare[2], 1)
    size = MixedSize(len(step.tokens) + spare[0], step.decodes + spare[1], room)
    graphs = MixedGraphs((size,), size.rows, frame(page_size))
    buffer = np.full(graphs.layout(size).words, -7, dtype=np.int32)  # what another step left there
    views = graphs.layout(size).host(buffer)
    words, places, restricted = graphs.pack(step, size, buffer)
    assert restricted == restricts(step)
    found = {}
    for row in range(size.decodes):
        assert views["q_indptr"][row : row + 2].tolist() == [row, row + 1]
        begin, end = views["kv_indptr"][row : row + 2]
        pages, real = views["indices"][begin:end], row < step.decodes
        if not real:
            assert (pages.tolist(), views["lengths"][row], views["last_page"][row]) == ([0], 0, 1)
        if real:
            assert (len(pages) - 1) * page_size + views["last_page"][row] == views["lengths"][row]
            found[int(views["token_slots"][row])] = (row, row + 1), views["lengths"][row], pages
    assert words == graphs.layout(size).indices_at + (views["kv_indptr"][size.decodes])
    table = views["table"].reshape(size.prefills, -1)
    for row in range(size.prefills):
        begin, end = views["prefill_indptr"][row : row + 2].tolist()
        assert (begin < end) == (row < prompts)
        if begin < end:
            length = views["lengths"][size.decodes + row]
            found[int(views["token_slots"][begin])] = (begin, end), length, table[row]
    assert len(found) == len(rows)
    check_mixed_tokens(step, views, found, page_size)
    check_sampling(step, views, places, len(views["top_k"]))


def check_mixed_tokens(step, views, found, page_size):
    first, lasts = 0, []
    for row, count in enumerate(step.counts.tolist()):
        (begin, end), length, pages = found[int(step.slots[row])]
        start = int(step.starts[row])
        held = step.pages[row, : -(-(start + count) // page_size)]
        assert (end - begin, length) == (count, start + count)
        assert pages[: len(held)].tolist() == held.tolist()
        assert views["tokens"][begin:end].tolist() == step.tokens[first : first + count].tolist()
        positions = np.arange(start, start + count)
        assert views["positions"][begin:end].tolist() == positions.tolist()
        places = held[positions // page_size] * page_size + positions % page_size
        assert views["store"][begin:end].tolist() == places.tolist()
        assert (views["token_slots"][begin:end] == step.slots[row]).all()
        first += count
        lasts += [end - 1] * bool(step.samples[row])
    assert views["last"][: len(lasts)].tolist() == lasts
    assert (views["store"][first:] == packing.NOWHERE).all()
    assert (views["token_slots"][first:] == DUMMY_SLOT).all()


@given(*[st.integers(1, 4000)] * 2, st.integers(1, 300), st.integers(0, 256))
def test_graphs_of_mixed_steps_fit_into_the_largest_step(tokens, mixed, rows, decodes):
    decodes = min(decodes, rows, tokens)
    for size in mixed_ladder(tokens, rows, decodes, mixed):
        assert decodes and size.rows <= size.tokens <= tokens
        assert size.decodes <= decodes and size.prefills <= rows


def test_a_step_takes_the_smallest_graph_that_holds_it_and_none_that_is_far_larger():
    graphs = MixedGraphs(mixed_ladder(2048, 256, 256, 512), 256, frame(64))
    assert graphs.fitting(make_step([0], [100], [True], 64)) is None, "nothing is captured yet"
    graphs._captured = dict.fromkeys(graphs.sizes)

    def fitting(*counts):
        return graphs.fitting(make_step([0] * len(counts), counts, [True] * len(counts), 64))

    assert fitting(100) == MixedSize(128, 0, 8)
    assert fitting(1, 1, 126) == MixedSize(128, 64, 32)
    assert fitting(*[1] * 65, 200) == MixedSize(320, 128, 32)
    assert fitting(*[1] * 130, 200) == MixedSize(384, 256, 32), "classes of rows double"
    assert fitting(*[1] * 130, 100) == MixedSize(256, 224, 32), "and each size holds as many as fit"
    assert fitting(*[1] * 65, 450) is None, "more than a mixed step ever has"
    assert fitting(*[8] * 9) == MixedSize(128, 64, 32), "too many prompts for the smallest"
    assert fitting(1, 1) is None and fitting(2049) is None
    assert fitting(1030) is None, "a third would be padding"


@given(st.integers(1, 9), st.integers(0, 6), st.sampled_from([1, 16]), st.booleans())
def test_measured_decodes_read_pages_of_their_own_and_write_to_the_dummy(
    rows, pages, page_size, table
):
    step = deep_decodes(rows, pages, page_size, DUMMY_SLOT)
    layout = DecodeGraphs((rows,), frame(page_size, table)).layout(rows)
    views = layout.host(np.zeros(layout.words, dtype=np.int32))
    used, _ = packing.pack_decodes(step, views, page_size, DUMMY_SLOT, table)
    read = views["table"].reshape(rows, -1) if table else views["indices"][:used]
    read = read[read > 0]
    assert len(set(read)) == len(read) == rows * pages
    assert views["lengths"].tolist() == [pages * page_size + 1] * rows
    assert (views["store"] // page_size == 0).all()
    assert (views["write_slots"] == DUMMY_SLOT).all()
    assert (views["token_slots"] == DUMMY_SLOT).all()


@given(st.sampled_from(mixed_ladder(1024, 256, 256, 1024)), st.sampled_from([0, 100, 2048]),
       st.sampled_from([300, 5000]))  # fmt: skip
def test_measured_prompts_fill_their_graph_and_write_to_the_dummy(size, depth, longest):
    depth = depth if longest > size.tokens + depth else 0
    step = amid_prompts(size, longest, depth, Frame(400, 16, False, 256, torch.device("cpu")))
    prompts = step.counts[step.decodes :]
    assert len(step.tokens) == size.tokens
    assert step.decodes <= size.decodes and len(prompts) <= size.prefills
    assert (step.starts[step.decodes :] == depth).all() and (prompts + depth <= longest).all()
    assert (step.pages == 0).all() and (step.slots == 256).all()
    assert MixedGraphs((size,), 256, frame(16)).layout(size).sizes.samples >= len(step.slots)


@given(st.integers(1, 9), st.integers(1, 50), st.integers(0, 9), st.integers(1, 7))
def test_regions_do_not_overlap_and_begin_at_16_bytes(rows, tokens, samples, pages):
    layout = Layout(Sizes(rows, tokens, samples, pages, rows * pages))
    end = 0
    for region in layout.regions.values():
        assert region.begin >= end
        assert region.begin % 4 == 0
        end = region.begin + region.count * np.dtype(region.dtype).itemsize // 4
    assert layout.words >= end
    assert list(layout.regions)[-1] == "indices"


@pytest.mark.parametrize("most", [1, 2, 3, 8, 20, 256])
def test_the_ladder_of_graph_sizes_ends_with_the_largest_batch(most):
    sizes = ladder(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert all(b - a <= max(8, a) for a, b in pairwise(sizes))
    assert ladder(0) == ()


def test_a_step_is_restricted_by_any_of_the_four_and_by_nothing_else():
    step = make_step([3], [1], [True], 16)
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, value in (("top_k", 5), ("top_p", 0.5), ("min_p", 0.1), (None, None)):
        knobs = plain | ({name: value} if name else {})
        for knob, one in knobs.items():
            step.sampling.fields[knob][:] = one
        assert restricts(step) == (name is not None)

"""What a GPU's kernels index with, from a step to the arrays, against the definition. No GPU is
needed: the kernel's reference stands in for it (tests/kernels/prepare_inputs_cases.py compares
both).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.attention.interface import BackendCapabilities
from pipeinfer.engine.calibrate import PageGeometry, alike_decodes, amid_prompts, deep_decodes
from pipeinfer.engine.device import HostDevice
from pipeinfer.engine.graphs import (
    MIN_SHARED_DECODES,
    Graphs,
    StepCapacity,
    decode_ladder,
    decode_only,
    eager_and_deferred,
    mixed_ladder,
    shape_of,
    shared_prefix_variants,
    verifying_ladder,
)
from pipeinfer.engine.step_buffers import DeviceBuffers, SlotState, StepPacker, layout
from pipeinfer.engine.step_builder import FIELDS
from pipeinfer.kernels import host
from pipeinfer.kernels.interface import NO_KV_LOCATION, NO_LOGITS, StepShape
from pipeinfer.step import LAST_TOKEN, RequestLogitEdits, Step, StepDelta
from pipeinfer.wire import NO_DRAFTS
from step_pages import all_pages, pages_of

SLOTS, PAGES = 12, 96
LARGEST = StepCapacity(SLOTS, 400, PAGES)
LAST = 1000  # and the slot, in last_token
CPU = torch.device("cpu")


def some_fields(count: int, random) -> dict[str, np.ndarray]:
    return {
        field.name: random.integers(0, 2**64, count, dtype=np.uint64)
        if field.dtype is np.uint64
        else (9 * random.random(count)).astype(field.dtype)
        for field in FIELDS
    }


def make_step(starts, counts, samples, page_size, seed=0) -> Step:
    """Its delta says all of its rows, and more of them than the step needs to know."""
    random = np.random.default_rng(seed)
    rows = len(starts)
    starts, counts = (np.array(values, dtype=np.int32) for values in (starts, counts))
    samples = np.array(samples, dtype=bool)
    width = int(-(-(starts + counts).max() // page_size)) + 1
    slots = random.permutation(SLOTS)[:rows].astype(np.int32)
    pages = random.permutation(np.arange(1, rows * width + 1)).reshape(rows, width)
    fields = some_fields(rows, random)
    delta = all_pages(slots, pages)
    delta = StepDelta(delta.slots, delta.columns, delta.pages, admitted=slots, fields=fields)
    return Step(
        0, 0, int((counts == 1).sum()), slots, starts, counts, samples,
        random.integers(LAST_TOKEN, 50, int(counts.sum())).astype(np.int32),
        {name: values[samples] for name, values in fields.items()}, delta=delta,
    )  # fmt: skip


class Side:
    """The device's arrays for steps, and what its first two kernels do with them."""

    def __init__(self, page_size: int, lists_pages: bool = False, page_table="none") -> None:
        self.page_size = page_size
        traits = BackendCapabilities(
            None, 16, host_lengths=True, lists_pages=lists_pages, page_table=page_table
        )
        self.state = SlotState(SLOTS, PAGES, 4, CPU)
        self.state.by_slot.last_token[:] = LAST + torch.arange(SLOTS + 1)
        self.arrays = DeviceBuffers(LARGEST, page_size, traits, self.state, CPU, host)
        self.buffer = np.full(len(self.arrays.words), -7, dtype=np.int32)  # of another step
        self.packer = StepPacker(self.buffer, SLOTS)

    def expand(self, step: Step, room: StepShape, samples: int, graph: bool):
        views = self.arrays.views(room, samples, graph)
        changes = self.state.apply_on_host(step.delta)
        used, unpadded_rows = self.packer.pack(step, room, samples, changes)
        assert (self.buffer[used:] == -7).all(), "what is not uploaded is not written"
        self.arrays.words[:used] = torch.from_numpy(self.buffer[:used])
        self.arrays.words[used:] = 2**20  # an index that would fault if it were used
        self.arrays.prepare(views)
        return views, unpadded_rows


def check(side: Side, step: Step, views, unpadded_rows) -> None:
    """Every row, token and row of logits is what the step says; what is left over is padding."""
    shape, size = views.shape, side.page_size
    pages, found, real = pages_of(step, size), {}, []
    for index, slot in enumerate(views.slots.tolist()):
        begin, end = views.qo_indptr[index : index + 2].tolist()
        if slot == SLOTS:
            assert end - begin == int(views.seq_lens[index]) == views.padding_row_tokens
            continue
        [row] = np.flatnonzero(step.slots == slot)
        found[row] = begin, end
        start, count = int(step.starts[row]), int(step.counts[row])
        assert (index < shape.num_decodes) == (row < step.num_decodes)
        assert (end - begin, int(views.seq_lens[index])) == (count, start + count)
        check_pages(side, views, index, pages[row, : -(-(start + count) // size)].tolist())
        check_tokens(step, views, pages[row], row, begin, size)
        real += range(begin, end)
    assert len(found) == len(step.slots)
    left = np.setdiff1d(np.arange(shape.num_tokens), real)
    assert (views.slot_mapping[left] == NO_KV_LOCATION).all() and not views.positions[left].any()
    assert not views.input_ids[left].any()
    prompts = (views.qo_indptr[shape.num_decodes :] - views.prefill_query_base).tolist()
    assert views.prefill_qo_indptr.tolist() == prompts
    check_logits_rows(step, views, unpadded_rows, found)


def check_tokens(step, views, pages, row, begin, size) -> None:
    start, count = int(step.starts[row]), int(step.counts[row])
    positions = np.arange(start, start + count)
    first = int(step.counts[:row].sum())
    tokens = step.tokens[first : first + count]
    here = slice(begin, begin + count)
    assert views.positions[here].tolist() == positions.tolist()
    places = pages[positions // size].astype(int) * size + positions % size
    assert views.slot_mapping[here].tolist() == places.tolist()
    expected = np.where(tokens == LAST_TOKEN, LAST + step.slots[row], tokens)
    assert views.input_ids[here].tolist() == expected.tolist()


def check_pages(side: Side, views, index: int, pages: list[int]) -> None:
    """They stand behind where the row's pages begin, and in the page table."""
    begin, count, last = int(views.kv_indptr[index]), len(pages), int(views.last_page_len[index])
    assert views.kv_indices[begin : begin + count].tolist() == pages
    assert (count - 1) * side.page_size + last == int(views.seq_lens[index])
    if index >= views.shape.num_rows - len(views.row_page_table):
        [row] = views.page_table_of(index, index + 1)
        assert row[:count].tolist() == pages


def check_logits_rows(step, views, unpadded_rows, found) -> None:
    sampling, wanted = views.sampling, np.flatnonzero(step.samples)
    unpadded_rows = np.arange(len(wanted)) if unpadded_rows is None else unpadded_rows
    others = np.setdiff1d(np.arange(views.num_logits), unpadded_rows)
    assert sampling["write_slots"][unpadded_rows].tolist() == step.slots[wanted].tolist()
    assert (sampling["write_slots"][others] == SLOTS).all()
    ends = (step.starts + step.counts)[wanted]
    assert sampling["sample_positions"][unpadded_rows].tolist() == ends.tolist()
    lasts = [found[row][1] - 1 for row in wanted.tolist()]
    assert views.logits_indices[unpadded_rows].tolist() == lasts
    if views.logits_of_every_token:
        assert unpadded_rows.tolist() == lasts
    for field in FIELDS:
        values = sampling[field.name].numpy().view(field.dtype)
        assert values[unpadded_rows].tolist() == step.fields[field.name].tolist()
        assert (values[others] == field.dtype(field.filler)).all()


def check_host(side: Side, step: Step, views) -> None:
    """What backends plan with on the host is what the device has."""
    inputs = side.arrays.attention_inputs(views, 0, side.buffer, step)
    names = ["last_page_len", "qo_indptr", "prefill_qo_indptr"]
    for name in [*names, "kv_indptr"] if views.lists_pages else names:
        assert torch.equal(getattr(inputs.on_host, name), getattr(views, name)), name
    if views.padded:
        assert inputs.max_pages == PAGES
        return
    assert inputs.max_query_len == step.counts.max()
    assert inputs.max_pages == -(-(step.starts + step.counts).max() // side.page_size)


KINDS = st.sampled_from([(False, "none"), (True, "none"), (False, "prefills"), (False, "all")])
decode_rows = st.lists(st.tuples(st.integers(0, 70), st.booleans()), min_size=1, max_size=9)
mixed_rows = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 40), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=40, deadline=None)
@given(decode_rows, st.integers(0, 3), st.sampled_from([1, 16]), KINDS)
def test_a_graph_of_decodes_reads_of_every_row_what_the_step_says(rows, spare, page_size, kind):
    starts, samples = [row[0] for row in rows], [row[1] for row in rows]
    step = make_step(starts, [1] * len(rows), samples, page_size)
    side, size = Side(page_size, *kind), len(rows) + spare
    for further in range(3):  # the same rows again
        step = replace(step, number=further, starts=step.starts + min(further, 1))
        if further == 2:  # others, of the same number
            step = make_step(starts[::-1], [1] * len(rows), samples[::-1], page_size, seed=1)
        side.buffer[layout(decode_only(size)).changes :] = -7
        views, unpadded_rows = side.expand(step, decode_only(size), size, graph=True)
        assert (unpadded_rows is None) == all(samples)
        check(side, step, views, unpadded_rows)
        check_host(side, step, views)


@settings(max_examples=40, deadline=None)
@given(mixed_rows, st.tuples(*[st.integers(0, 2)] * 2), st.integers(0, 5),
       st.sampled_from([1, 16]), KINDS)  # fmt: skip
def test_a_graph_with_prompts_reads_of_every_row_what_the_step_says(
    rows, spare, tokens, page_size, kind
):
    rows = sorted(rows, key=lambda row: row[1] != 1)
    step = make_step(*zip(*rows, strict=True), page_size)
    prompts = len(rows) - step.num_decodes
    room = StepShape(
        len(step.tokens) + tokens, step.num_decodes + spare[0], max(prompts + spare[1], 1)
    )
    side = Side(page_size, *kind)
    views, unpadded_rows = side.expand(step, room, min(room.num_rows, SLOTS), graph=True)
    assert unpadded_rows is None
    check(side, step, views, unpadded_rows)
    check_host(side, step, views)


@settings(max_examples=40, deadline=None)
@given(mixed_rows, st.sampled_from([1, 16]), KINDS)
def test_a_step_without_a_graph_takes_what_it_needs(rows, page_size, kind):
    rows = sorted(rows, key=lambda row: row[1] != 1)
    step = make_step(*zip(*rows, strict=True), page_size)
    side = Side(page_size, *kind)
    views, unpadded_rows = side.expand(step, shape_of(step), int(step.samples.sum()), graph=False)
    assert unpadded_rows is None
    check(side, step, views, unpadded_rows)
    check_host(side, step, views)


def test_what_changes_in_a_slot_reaches_the_words_that_kernels_read():
    state, random = SlotState(SLOTS, PAGES, 4, CPU), np.random.default_rng(0)

    def apply(**changes) -> None:
        pairs = torch.from_numpy(state.apply_on_host(StepDelta(**changes))).view(-1, 2).long()
        assert len(pairs[:, 0].unique()) == len(pairs), "an index twice has either value"
        state.words[pairs[:, 0]] = pairs[:, 1].int()

    def edits(slot, ids):
        count = len(ids)
        return RequestLogitEdits(
            slot, np.array(ids, np.int32), random.random(count, dtype=np.float32),
                     random.integers(0, 99, count).astype(np.int32))  # fmt: skip

    admitted, said = np.array([3, 11, 0], np.int32), (edits(11, [5, 7, 9, 2]), edits(0, [8]))
    fields, adapter_slots = some_fields(3, random), np.array([0, 2, 1], np.int32)
    apply(admitted=admitted, fields=fields, adapter_slots=adapter_slots, logit_edits=said)
    assert state.adapter_slots[admitted].tolist() == [0, 2, 1]
    assert state.adapter_slots.count_nonzero() == 2
    apply(slots=np.array([3], np.int32), columns=np.array([95], np.int32),
          pages=np.array([77], np.int32))  # fmt: skip
    assert np.argwhere(state.by_slot.page_table.numpy()).tolist() == [[3, 95]]
    assert state.by_slot.page_table[3, 95] == 77
    assert state.logit_edits.counts.nonzero().view(-1).tolist() == [0, 11]
    for one in said:
        assert state.logit_edits.counts[one.slot] == len(one.ids)
        ids, values, until = state.logit_edits.words[:, one.slot, : len(one.ids)]
        assert ids.tolist() == one.ids.tolist() and until.tolist() == one.until.tolist()
        assert values.view(torch.float32).tolist() == one.values.tolist()
    apply(admitted=admitted[1:2], fields=some_fields(1, random))
    assert state.logit_edits.counts.nonzero().view(-1).tolist() == [0], (
        "nothing of who was there before"
    )
    assert state.adapter_slots.nonzero().view(-1).tolist() == [0]
    with pytest.raises(ValueError, match="5 edits"):
        apply(
            admitted=admitted[:1], fields=some_fields(1, random), logit_edits=(edits(3, range(5)),)
        )


@pytest.mark.parametrize(
    "change",
    [{"samples": np.array([False, True, True])}, {"tokens": np.array([4, -1, 7], np.int32)}, {}],
)
def test_only_a_step_that_differs_in_nothing_else_is_packed_as_what_differs(change):
    step, side = make_step([20, 5, 9], [1, 1, 1], [True, False, True], 16), Side(16)
    side.expand(step, decode_only(3), 3, graph=True)
    step = replace(step, **change)
    fields = {name: values[step.samples] for name, values in step.delta.fields.items()}
    step = replace(step, fields=fields)
    for samples, graph in ((3, True), (2, False)):
        check(side, step, *side.expand(step, decode_only(3), samples, graph))


def test_what_is_larger_than_all_that_was_made_room_for_is_refused():
    side = Side(16)
    for room, samples in (
        (StepShape(401, 1, 1), 1), (StepShape(100, 13, 0), 12), (StepShape(100, 1, 13), 1),
        (StepShape(9, 9, 0), 13),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="largest"):
            side.arrays.views(room, samples, padded=False)
    step = make_step([0], [1], [True], 16)
    step = replace(step, slots=np.array([SLOTS], np.int32), delta=StepDelta())
    with pytest.raises(ValueError, match="slot 12, where there are 12"):
        side.expand(step, decode_only(1), 1, graph=True)


@given(*[st.integers(1, 4000)] * 2, st.integers(1, 300), st.integers(0, 256))
def test_graphs_of_mixed_steps_fit_into_the_largest_step(tokens, mixed, rows, decodes):
    decodes = min(decodes, rows, tokens)
    most = layout(StepShape(tokens, rows, rows)).changes
    for room in mixed_ladder(tokens, rows, decodes, mixed):
        assert decodes and room.num_rows <= room.num_tokens <= tokens
        assert room.num_decodes <= decodes and room.num_prefills <= rows
        assert layout(room).changes <= most


def test_a_step_takes_the_smallest_graph_that_holds_it_and_none_that_is_far_larger():
    graphs = Graphs(HostDevice())

    def fitting(*counts):
        rows = len(counts)
        step = Step(0, 0, counts.count(1), np.zeros(rows, np.int32), np.zeros(rows, np.int32),
                    np.array(counts, np.int32), np.ones(rows, bool),
                    np.zeros(sum(counts), np.int32), {})  # fmt: skip
        return graphs.fitting(step)

    assert fitting(100) is None and fitting(1) is None, "nothing is captured yet"
    graphs.mixed, graphs.decodes = mixed_ladder(2048, 256, 256, 512), (1, 4, 8)
    rooms = [*graphs.mixed, *map(decode_only, graphs.decodes)]
    graphs._captured = {room: room for room in rooms}
    assert fitting(100) == StepShape(128, 0, 8)
    assert fitting(1, 1, 126) == StepShape(128, 64, 32)
    assert fitting(*[1] * 65, 200) == StepShape(320, 128, 32)
    assert fitting(*[1] * 130, 200) == StepShape(384, 256, 32), "classes of rows double"
    assert fitting(*[1] * 130, 100) == StepShape(256, 224, 32), "and each size holds as many as fit"
    assert fitting(*[1] * 65, 450) is None, "more than a mixed step ever has"
    assert fitting(*[8] * 9) == StepShape(128, 64, 32), "too many prompts for the smallest"
    assert fitting(2049) is None
    assert fitting(1030) is None, "a third would be padding"
    assert [fitting(*[1] * rows) for rows in (1, 2, 4, 5)] == [
        decode_only(rows) for rows in (1, 4, 4, 8)
    ]
    assert fitting(*[1] * 9) is None


@given(st.lists(st.sampled_from([NO_DRAFTS, 0, 1, 3, 4]), min_size=1, max_size=12), st.booleans())
def test_a_step_that_verifies_drafts_alone_has_a_graph_with_logits_for_every_token(drafts, prompt):
    """prompt: a row of the step computes a chunk of a prompt, which samples nothing."""
    largest = StepCapacity(rows=64, tokens=400, pages=8, drafts=4, draft_rows=8)
    graphs = Graphs(HostDevice())
    graphs.verifying = verifying_ladder(largest)
    graphs._captured = {shape: shape for shape in graphs.verifying}
    drafts = sorted(drafts, key=lambda count: count > 0)  # rows of one token first
    counts = [1 + max(count, 0) for count in drafts] + [3] * prompt
    rows, samples = len(counts), [True] * len(drafts) + [False] * prompt
    step = Step(0, 0, counts.count(1), np.zeros(rows, np.int32), np.zeros(rows, np.int32),
                np.array(counts, np.int32), np.array(samples), np.zeros(sum(counts), np.int32), {},
                drafts=np.array(drafts + [NO_DRAFTS] * prompt, np.int32))  # fmt: skip
    shape = graphs.fitting(step)
    verifies = any(count > 0 for count in drafts)
    if not verifies or prompt or rows > 8:
        assert shape is None or not prompt
        return
    assert shape is not None and shape.num_tokens <= 2 * rows * 5
    assert shape.num_decodes == 0 or step.num_decodes > 0
    words = np.full(layout(shape).changes + 8, 99, dtype=np.int32)
    packer = StepPacker(words, padding_slot=63)
    _, unpadded_rows = packer.pack(step, shape, shape.num_tokens, np.empty(0, np.int32))
    at = layout(shape)
    packed = words[at.counts : at.counts + shape.num_rows]
    firsts = words[at.logits_rows : at.logits_rows + shape.num_rows]
    assert unpadded_rows is None, "rows of logits of the step come first"
    assert packed[packed > 0].tolist() == counts
    assert firsts[packed > 0].tolist() == (np.cumsum(counts) - counts).tolist()
    assert (firsts[packed == 0] == NO_LOGITS).all()


def test_steps_take_larger_graphs_than_they_need_where_those_are_faster():
    graphs = Graphs(HostDevice())
    graphs.mixed = mixed_ladder(2048, 256, 256, 2048)
    graphs._captured = {room: room for room in graphs.mixed}

    def tokens(count: int) -> int | None:
        step = Step(0, 0, 0, *[np.zeros(1, np.int32)] * 2, np.array([count], np.int32),
                    np.ones(1, bool), np.zeros(count, np.int32), {})  # fmt: skip
        room = graphs.fitting(step)
        return None if room is None else room.num_tokens

    asked = 256, 257, 320, 321, 385, 448, 449, 513, 600
    assert [tokens(count) for count in asked] == [256, 320, 320, 384, 448, 448, 512, 640, 640]
    graphs.slow = frozenset((320, 448, 640))
    found = [tokens(count) for count in asked]
    assert found == [256, 384, 384, 384, 512, 512, 512, 640, 768], "768 is far larger than 513"


def test_decodes_that_share_what_they_read_take_graphs_of_their_own():
    graphs = Graphs(HostDevice())
    graphs.mixed, graphs.decodes = mixed_ladder(2048, 256, 256, 512), decode_ladder(256)
    usual = [*graphs.mixed, *map(decode_only, graphs.decodes)]
    graphs.shared_prefix_shapes = tuple(sorted(shared_prefix_variants(usual)))
    graphs._captured = {room: room for room in (*usual, *graphs.shared_prefix_shapes)}

    def fitting(decodes, prompts=0, shares=True):
        step = alike_decodes(decodes, prompts, 16)
        return graphs.fitting(step if shares else replace(step, shared_prefixes=None))

    assert fitting(130) == StepShape(192, 192, 0, shared_prefix=True)
    assert fitting(130, shares=False) == StepShape(136, 136, 0)
    assert fitting(MIN_SHARED_DECODES) == StepShape(16, 16, 0, shared_prefix=True)
    assert fitting(MIN_SHARED_DECODES - 1) == decode_only(8), "so few read as fast each for itself"
    assert fitting(60, 30) == StepShape(128, 64, 32, shared_prefix=True)
    assert fitting(65, 30) == StepShape(128, 96, 32, shared_prefix=True), (
        "as many decodes as it has room for"
    )
    assert fitting(65, 30, shares=False) == StepShape(128, 96, 32)
    graphs.slow = frozenset((128,))
    assert fitting(60, 30) == StepShape(192, 64, 32, shared_prefix=True)
    assert fitting(128) == StepShape(128, 128, 0, shared_prefix=True), "which has no prompts"
    graphs.shared_prefix_shapes = ()
    assert fitting(130) == StepShape(136, 136, 0), "until those are captured, each reads for itself"


def test_of_graphs_in_which_decodes_share_there_are_few_and_they_come_late():
    usual = [*map(decode_only, decode_ladder(200)), *mixed_ladder(4096, 200, 200, 4096)]
    few = shared_prefix_variants(usual)
    assert all(room.shared_prefix and room.num_decodes >= MIN_SHARED_DECODES for room in few)
    assert not {replace(room, shared_prefix=False) for room in few} - set(usual)
    assert len(few) < len(usual) / 2
    decodes = [room.num_decodes for room in few if not room.num_prefills]
    assert decodes == [16, 24, 32, 48, 64, 96, 128, 192, 200]
    # Of each number of tokens with decodes, one as large as any.
    for room in usual:
        if room.num_prefills and room.num_decodes >= MIN_SHARED_DECODES:
            same = [
                other for other in few if other.num_tokens == room.num_tokens and other.num_prefills
            ]
            assert max(other.num_decodes for other in same) >= room.num_decodes
    first, left = eager_and_deferred([*usual, *few])
    assert sorted([*first, *left]) == sorted([*usual, *few])
    assert [replace(room, shared_prefix=False) for room in first] == eager_and_deferred(usual)[0], (
        "as many at once"
    )
    assert [room for room in first if room.shared_prefix] == [
        room for room in first if twin(room) in few
    ]
    rest = [room for room in left if room.shared_prefix]
    alone_left = sum(not room.num_prefills for room in left)
    assert left[alone_left:][: len(rest)] == rest, "behind decodes alone"


def twin(room: StepShape) -> StepShape:
    return replace(room, shared_prefix=True)


def captured(graphs: Graphs, rooms: list[StepShape]) -> None:
    graphs.capture(rooms, lambda room: (room, None), lambda *_: (torch.ones(1),) * 2, int)


def test_large_steps_are_not_run_when_they_are_captured():
    found: dict[int, bool] = {}

    class Noting(HostDevice):
        def capture(self, body, first_run=True):
            found[at[0].num_tokens] = first_run
            return super().capture(body, first_run)

    at: list[StepShape] = []

    def pack(shape: StepShape):
        at[:] = [shape]
        return shape, None

    shapes = mixed_ladder(2048, 64, 64, 512)
    Graphs(Noting()).capture(shapes, pack, lambda *_: (torch.ones(1),) * 2, int)
    assert {tokens for tokens, first in found.items() if first} == {
        shape.num_tokens for shape in shapes if shape.num_tokens <= 512
    }
    assert max(found) == 2048


def test_only_small_numbers_of_decodes_may_turn_out_slower():
    graphs = Graphs(HostDevice())
    usual = [*map(decode_only, decode_ladder(64)), *mixed_ladder(512, 64, 64, 512)]
    first, _ = eager_and_deferred([*usual, *shared_prefix_variants(usual)])
    captured(graphs, first)
    mixed = graphs.mixed
    graphs.drop_slower_small_ones(lambda room: None)
    assert graphs.decodes[-6:] == (8, 16, 24, 32, 48, 64) and graphs.mixed == mixed
    assert graphs.fitting(replace(alike_decodes(40, 0, 16), shared_prefixes=None)) is not None


def test_until_others_are_there_every_step_takes_graphs_in_which_decodes_share():
    graphs = Graphs(HostDevice())
    usual = [*map(decode_only, decode_ladder(64)), *mixed_ladder(512, 64, 64, 512)]
    first, left = eager_and_deferred([*usual, *shared_prefix_variants(usual)])

    def fitting(decodes, prompts, shares):
        step = alike_decodes(decodes, prompts, 16)
        return graphs.fitting(step if shares else replace(step, shared_prefixes=None)).views

    captured(graphs, first)
    assert set(graphs.decodes) == {1, 2, 4, 8, 16, 24, 32, 48, 64}
    assert all(
        room.shared_prefix == (room.num_decodes >= MIN_SHARED_DECODES) for room in graphs.mixed
    )
    for shares in (False, True):
        assert fitting(40, 0, shares) == StepShape(48, 48, 0, shared_prefix=True)
        assert fitting(20, 20, shares) == StepShape(128, 64, 32, shared_prefix=True)
        assert fitting(4, 0, shares) == decode_only(4)
    step = replace(alike_decodes(48, 0, 16), shared_prefixes=None)
    assert graphs.like(decode_only(48), step) == StepShape(48, 48, 0, shared_prefix=True)
    captured(graphs, left)
    assert not any(room.shared_prefix for room in graphs.mixed)
    assert graphs.decodes == decode_ladder(64) and graphs.like(
        decode_only(48), step
    ) == decode_only(48)
    for shares in (False, True):
        assert fitting(40, 0, shares) == StepShape(
            48 if shares else 40, 48 if shares else 40, 0, shares
        )
        assert fitting(20, 20, shares) == StepShape(128, 64, 32, shares)


@given(st.integers(1, 9), st.integers(0, 3), st.sampled_from([1, 16]))
def test_decodes_that_are_alike_read_the_dummy_and_write_to_it(rows, prompts, page_size):
    step = alike_decodes(rows, prompts, page_size)
    assert not pages_of(step, page_size).any() and step.num_decodes == rows
    assert (step.starts[:rows] == page_size).all() and len(step.slots) == rows + prompts
    assert step.shared_prefixes.leaders.tolist() == [1] * rows, "one page, of row 0"
    assert step.shared_prefixes.ranks.tolist() == [rank << 16 | rows for rank in range(rows)]


@given(st.integers(1, 9), st.integers(0, 6), st.sampled_from([1, 16]))
def test_measured_decodes_read_pages_of_their_own_and_write_to_the_dummy(rows, pages, page_size):
    step = deep_decodes(rows, pages, page_size)
    table = pages_of(step, page_size)
    read = table[table > 0]
    assert len(set(read)) == len(read) == rows * pages
    assert (step.starts == pages * page_size).all() and step.slots.tolist() == list(range(rows))
    assert (table[np.arange(rows), step.starts // page_size] == 0).all()


@given(st.sampled_from(mixed_ladder(1024, 256, 256, 1024)), st.sampled_from([0, 100, 2048]),
       st.sampled_from([300, 5000]))  # fmt: skip
def test_measured_prompts_fill_their_graph_and_write_to_the_dummy(room, depth, longest):
    depth = depth if longest > room.num_tokens + depth else 0
    step = amid_prompts(room, longest, depth, PageGeometry(400, 16))
    prompts = step.counts[step.num_decodes :]
    assert len(step.tokens) == room.num_tokens
    assert step.num_decodes <= room.num_decodes and len(prompts) <= room.num_prefills
    assert (step.starts[step.num_decodes :] == depth).all() and (prompts + depth <= longest).all()
    assert not step.delta.pages.any() and len(step.slots) <= 256
    assert pages_of(step, 16).shape == (len(step.slots), -(-int((depth + prompts).max()) // 16))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 50))
def test_arrays_of_a_step_do_not_overlap_and_begin_at_16_bytes(decodes, prompts, tokens):
    room = StepShape(tokens, decodes, prompts)
    at = layout(room)
    sizes = [*[room.num_rows] * 6, tokens]
    assert all(begin % 4 == 0 for begin in at) and at[0] >= 1
    for (begin, after), size in zip(pairwise(at), sizes, strict=True):
        assert after >= begin + size


@pytest.mark.parametrize("most", [1, 2, 3, 8, 20, 256])
def test_the_ladder_of_graph_sizes_ends_with_the_largest_batch(most):
    sizes = decode_ladder(most)
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    assert all(b - a <= max(8, a) for a, b in pairwise(sizes))


def test_the_first_graphs_have_room_for_every_step_that_all_of_them_have():
    sizes = decode_ladder(200)
    ladder = mixed_ladder(4096, 200, 200, 4096)
    first, left = eager_and_deferred([*map(decode_only, sizes), *ladder])
    assert sorted([*first, *left]) == sorted([*map(decode_only, sizes), *ladder])
    assert len(left) > len(first)
    decodes = [room.num_decodes for room in first if not room.num_prefills]
    assert decodes == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200]
    mixed = [room for room in first if room.num_prefills]
    for room in left:
        held = [
            other for other in mixed if other.num_tokens == room.num_tokens
            and other.num_decodes >= room.num_decodes and other.num_prefills >= room.num_prefills
        ]  # fmt: skip
        assert (
            held
            if room.num_prefills
            else min(n for n in decodes if n >= room.num_decodes) <= (1.5 * room.num_decodes)
        )
    assert [room.num_prefills > 0 for room in left] == sorted(
        room.num_prefills > 0 for room in left
    )


def test_a_ladder_of_no_graphs_has_none_to_begin_with():
    assert eager_and_deferred([]) == ([], [])

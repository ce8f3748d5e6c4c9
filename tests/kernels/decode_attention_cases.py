"""Attention of one query a row, in Triton: cases for interpreter and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from device_steps import device_step
from draws import seeded
from kernels.triton_cases import (
    DEVICE,
    HALVES,
    INTERPRETED,
    TOLERANCE,
    randn,
    randn_on_device,
    relative_error,
)
from pipeinfer.attention.interface import AttentionInputs, KVPool
from pipeinfer.attention.triton_backend import TritonDecodeKernel
from pipeinfer.kernels.decode_attention import (
    DecodePrefixes,
    DecodeRows,
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
    empty_prefix_merges,
    empty_splits,
    max_prefix_splits,
    max_total_splits,
    split_rows,
    split_rows_reference,
)
from pipeinfer.kernels.formats import E4M3, UNIT_KV_SCALES, KVScales
from pipeinfer.kernels.interface import StepShape
from pipeinfer.kernels.tile_configs import DecodeConfig, LoadConfig
from pipeinfer.step import AttentionShape
from pipeinfer.wire import MAX_SHARED_PREFIXES, PREFIX_UPPER

WHOLE = DecodeConfig(extra_splits=4, max_splits=1, min_tokens=16, load=LoadConfig(16, 4, 2))
SPLITS = DecodeConfig(extra_splits=32, max_splits=4, min_tokens=16, load=LoadConfig(16, 4, 2))
LENGTHS = [1, 16, 17, 100, 33]
HEADS, KV_HEADS = (2, 1) if INTERPRETED else (4, 2)  # if a case says nothing


class Case:
    """Rows of those lengths, their pages in any order, and what is written for them."""

    def __init__(
        self, lengths, dtype=torch.float32, heads=HEADS, kv_heads=KV_HEADS, dim=32, page=16
    ):
        pages = [-(-length // page) for length in lengths]
        total = sum(pages) + 1
        order = torch.randperm(total - 1, generator=seeded(0)) + 1
        self.indices = order.to(torch.int32).to(DEVICE)
        starts = torch.tensor([0, *pages]).cumsum(0)
        self.indptr = starts.to(torch.int32).to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.k = randn_on_device(1, total, page, kv_heads, dim, dtype=dtype)
        self.v = randn_on_device(2, total, page, kv_heads, dim, dtype=dtype)
        self.q = randn(3, len(lengths), heads, dim, dtype=dtype)
        self.scale = dim**-0.5
        self.scales = UNIT_KV_SCALES
        most = max_total_splits(len(lengths), SPLITS)
        self.pieces = empty_splits(most, self.q.device)
        self.scratch = DecodeWorkspace(len(lengths), most, (heads, kv_heads, dim), self.q.device)

    def rows(self):
        return DecodeRows(self.lengths, self.indptr, self.indices, self.pieces)

    def run(self, cut, window=None, sinks=None):
        out = torch.full_like(self.q, float("nan"))
        split_rows(self.lengths, self.pieces, cut, window)
        return decode_attention(
            self.q, self.k, self.v, self.rows(), self.scale, out, self.scratch, cut, window,
            use_pdl=False, sinks=sinks, scales=self.scales,
        )  # fmt: skip

    def expected(self, window=None, sinks=None):
        rows = self.rows()
        return decode_attention_reference(
            self.q, self.k, self.v, rows, self.scale, window, sinks, self.scales
        )

    def in_8_bits(self, scales):
        """The same with pages of e4m3; what stood there is what is stored."""
        self.k, self.v, self.scales = self.k.to(E4M3), self.v.to(E4M3), scales
        return self


@pytest.mark.parametrize(
    "cut",
    [
        WHOLE,
        SPLITS,
        DecodeConfig(extra_splits=3, max_splits=32, min_tokens=16, load=LoadConfig(16, 4, 2)),
        DecodeConfig(extra_splits=64, max_splits=2, min_tokens=64, load=LoadConfig(32, 4, 2)),
    ],
)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(
    "lengths", [[1], [0, 0], [16, 16, 16], [300, 0, 17, 500, 16, 1, 400, 33], list(range(0, 70, 5))]
)
def test_rows_are_cut_as_by_the_reference(lengths, window, cut):
    rows = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    most = max_total_splits(len(lengths), cut)
    pieces = empty_splits(most, rows.device).fill_(-7)
    split_rows(rows, pieces, cut, window)
    expected = split_rows_reference(rows, cut, window)
    assert len(expected) <= most
    pieces = pieces[:, :4].tolist()
    found = [(row, start, stop, at & 0xFFFF, at >> 16) for row, start, stop, at in pieces]
    assert found[: len(expected)] == expected
    assert all(row == -1 for row, *_ in found[len(expected) :])
    for row, length in enumerate(lengths):  # every key of the window, once
        mine = [(start, stop) for its, start, stop, _, _ in expected if its == row]
        begin = max(length - (window or length), 0) // cut.load.block_n * cut.load.block_n
        covered = [token for start, stop in mine for token in range(start, stop)]
        assert covered == list(range(begin, length))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("cut", [WHOLE, SPLITS])
def test_decode_attention_is_that_of_the_reference(cut, dtype):
    case = Case(LENGTHS, dtype)
    # Weights are rounded to the values' dtype once more, before they are multiplied.
    tolerance = 3 * TOLERANCE[dtype]
    assert relative_error(case.run(cut), case.expected()) < tolerance


@pytest.mark.parametrize("cut", [WHOLE, SPLITS])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(5, 1, 64, 1), (32, 2, 16, 64), (4, 1, 256, 16)]
)
def test_decode_attention_takes_all_groups_and_pages(heads, kv_heads, dim, page, cut):
    case = Case([3, 70], heads=heads, kv_heads=kv_heads, dim=dim, page=page)
    assert relative_error(case.run(cut), case.expected()) < 3e-6


@pytest.mark.parametrize("cut", [WHOLE, SPLITS])
@pytest.mark.parametrize("window", [1, 20, 1000])
def test_decode_attention_sees_its_window_only(window, cut):
    case = Case(LENGTHS)
    assert relative_error(case.run(cut, window), case.expected(window)) < 3e-6


@pytest.mark.parametrize("cut", [WHOLE, SPLITS])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks_take_their_weight_whether_small_or_overwhelming(window, cut):
    case = Case(LENGTHS, heads=6)
    sinks = torch.tensor([0.0, -3.0, 2.5, float("-inf"), 80.0, 1e4], device=DEVICE)
    got, expected = case.run(cut, window, sinks), case.expected(window, sinks)
    assert relative_error(got, expected) < 3e-6
    assert relative_error(got[:, 3], case.expected(window)[:, 3]) < 3e-6
    assert not got[:, 5].any()


@pytest.mark.parametrize("cut", [WHOLE, SPLITS])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("page", [1, 16])
def test_what_a_former_owner_left_in_the_pages_is_not_read(page, window, cut):
    """A weight of 0 times a NaN is NaN: what lies behind a row must not even be multiplied."""
    case = Case(LENGTHS, page=page)
    clean = case.run(cut, window)
    owned = torch.zeros(case.k.shape[:2], dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(LENGTHS):
        pages = case.indices[int(case.indptr[row]) : int(case.indptr[row + 1])].long()
        begin = max(length - (window or length), 0)
        for token in range(begin, length):
            owned[pages[token // page], token % page] = True
    for part in (case.k, case.v):
        part[~owned] = float("nan")
    assert torch.equal(case.run(cut, window), clean)


@pytest.mark.parametrize("part", ["k", "v"])
def test_a_row_with_a_nan_of_its_own_spoils_no_other(part):
    case = Case(LENGTHS)
    clean = case.run(SPLITS)
    getattr(case, part)[case.indices[int(case.indptr[3])].long(), 2] = float("nan")
    got = case.run(SPLITS)
    assert got[3].isnan().any(dim=-1).all()
    assert torch.equal(got[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


def test_parts_are_counted_anew_in_every_launch():
    case = Case(LENGTHS)
    first = case.run(SPLITS)
    assert int(case.scratch.counters.abs().sum()) == 0
    assert torch.equal(case.run(SPLITS), first)


def test_a_row_that_is_cut_alike_does_not_depend_on_the_others():
    case, alone = Case(LENGTHS), Case(LENGTHS)
    full = case.run(WHOLE)
    alone.q, alone.lengths, alone.indptr = case.q[3:4], case.lengths[3:4], case.indptr[3:5]
    assert torch.equal(alone.run(WHOLE), full[3:4])


def test_a_row_without_keys_writes_nothing():
    case = Case([5, 20])
    full = case.run(SPLITS)
    case.lengths[0] = 0
    got = case.run(SPLITS)
    assert got[0].isnan().all()
    assert torch.equal(got[1], full[1])


@pytest.mark.parametrize(
    ("kv_heads", "dim", "scales"),
    [(2, 32, None), (1, 256, None), (1, 32, [KVScales(2**-n, 0.1 * (n + 1)) for n in range(4)])],
)
def test_layers_with_windows_of_their_own_share_a_plan(kv_heads, dim, scales):
    windows, heads, page = [None, 20, None, 20], 4, 16
    device = torch.device(DEVICE)
    some = randn(8, heads)
    shapes = [
        AttentionShape(heads, kv_heads, dim, dim**-0.5, window, sinks)
        for window, sinks in zip(windows, [None, None, some, some], strict=True)
    ]
    pool = KVPool(shapes, 16, page, torch.float32, device, scales)
    for layer in range(len(shapes)):
        pool.k[layer].copy_(randn(layer, *pool.k[layer].shape).to(pool.storage_dtype))
        pool.v[layer].copy_(randn(9 + layer, *pool.v[layer].shape).to(pool.storage_dtype))
    kernel = TritonDecodeKernel(shapes, device)
    kernel.bind(pool, 8)
    for lengths in ([70, 0, 5], [16, 33, 100, 1]):  # the second step finds what the first left
        case = Case(lengths, heads=heads, kv_heads=kv_heads, dim=dim, page=page)
        step = device_step(
            StepShape(len(lengths), len(lengths), 0),
            seq_lens=case.lengths,
            kv_indptr=case.indptr,
            kv_indices=case.indices,
        )
        plan = kernel.build_metadata(AttentionInputs(step, 1, len(case.indices)), 0, len(lengths))
        there = case.lengths > 0
        for layer, window in enumerate(windows):
            out = torch.zeros_like(case.q)
            kernel.run(layer, case.q, out, plan)
            keys, values = pool.k[layer], pool.v[layer]
            rows, scale = case.rows(), case.scale
            sinks = shapes[layer].sinks
            expected = decode_attention_reference(
                case.q, keys, values, rows, scale, window, sinks, pool.scales[layer]
            )
            assert relative_error(out[there], expected[there]) < 3e-6
            assert not out[~there].any()


# Of bfloat16, too: where pages have 8 bits it is multiplied as halves.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cut", [WHOLE, SPLITS])
@pytest.mark.parametrize("window", [None, 20])
def test_pages_of_8_bits_are_read_with_their_scales(window, cut, dtype):
    case = Case(LENGTHS, dtype).in_8_bits(KVScales(0.5, 3.0))
    got, expected = case.run(cut, window), case.expected(window)
    assert relative_error(got, expected) < 3 * TOLERANCE[dtype]
    case.scales = UNIT_KV_SCALES
    assert relative_error(got, case.expected(window)) > 0.5


def test_every_number_of_8_bits_is_read_as_it_is():
    """A row of one key gives that key's value."""
    case = Case([1] * 8, heads=1, kv_heads=1, dim=32, page=1).in_8_bits(UNIT_KV_SCALES)
    at = case.indices.long()
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(8, 1, 1, 32)
    case.v.view(torch.uint8)[at] = numbers
    got, expected = case.run(WHOLE), numbers.view(E4M3).float()[:, 0]
    assert torch.equal(got.isnan(), expected.isnan()) and int(expected.isnan().sum()) == 2
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


class SharedCase(Case):
    """groups: of each (rows, tokens that they begin with in common, a multiple of the page)."""

    def __init__(self, lengths, groups, cut, **kinds):
        super().__init__(lengths, **kinds)
        self.cut, self.page = cut, kinds.get("page", 16)
        self.seats = cut.rows_per_prefix_tile(self.q.shape[1] // self.k.shape[2])
        lines, seats = torch.zeros(2, len(lengths), dtype=torch.int32)
        for rows, tokens in groups:
            pages = tokens // self.page
            begin = int(self.indptr[rows[0]])
            for rank, row in enumerate(rows):
                at = int(self.indptr[row])
                self.indices[at : at + pages] = self.indices[begin : begin + pages].clone()
                lines[row] = rows[0] * PREFIX_UPPER + pages
                seats[row] = rank * PREFIX_UPPER + len(rows)
        most = max_total_splits(len(lengths), cut, self.seats)
        heads = self.q.shape[1], *self.k.shape[2:]
        self.runs = DecodePrefixes(
            lines.to(DEVICE), seats.to(DEVICE), *empty_prefix_merges(len(lengths), DEVICE)
        )
        self.pieces = empty_splits(most, self.q.device).fill_(-7)
        self.scratch = DecodeWorkspace(
            len(lengths), most, heads, self.q.device, most, cut.prefix_queries
        )

    def rows(self):
        return DecodeRows(self.lengths, self.indptr, self.indices, self.pieces, self.runs)

    def cut_rows(self):
        split_rows(self.lengths, self.pieces, self.cut, None, self.runs, self.seats, self.page)

    def attend(self, out, sinks=None, q=None, use_pdl=False):
        return decode_attention(
            self.q if q is None else q, self.k, self.v, self.rows(), self.scale, out, self.scratch,
            self.cut, use_pdl=use_pdl, sinks=sinks, scales=self.scales,
        )  # fmt: skip

    def run_shared(self, sinks=None):
        self.cut_rows()
        return self.attend(torch.full_like(self.q, float("nan")), sinks)


TILED = DecodeConfig(
    extra_splits=8,
    max_splits=4,
    min_tokens=64,
    load=LoadConfig(16, 4, 2),
    prefix_queries=16,
    min_prefix_tokens=32,
)
WIDE = DecodeConfig(
    extra_splits=32,
    max_splits=16,
    min_tokens=16,
    load=LoadConfig(32, 4, 2),
    prefix_queries=64,
    min_prefix_tokens=16,
)
APART = replace(WIDE, prefix_load=LoadConfig(64, 4, 2), extra_prefix_splits=2)  # in two launches
SHARING = [
    ([70, 90, 33], [([0, 1], 64)]),
    ([70, 5, 90, 0, 49, 130], [([0, 2, 5], 64), ([1], 0), ([4], 48)]),
    ([100] * 10 + [300, 3, 280], [(list(range(1, 10)), 96), ([10, 12], 256)]),
    ([257, 258, 259, 512], [([3, 0, 1, 2], 256)]),
    ([20] * 12, [([row, row + 1], 16) for row in range(0, 12, 2)]),
]


@pytest.mark.parametrize("cut", [TILED, WIDE, APART])
@pytest.mark.parametrize(("lengths", "groups"), SHARING)
def test_every_key_of_a_row_lies_in_its_own_pieces_or_in_those_of_its_run(lengths, groups, cut):
    case = SharedCase(lengths, groups, cut)
    case.cut_rows()
    runs = {row: tokens for rows, tokens in groups for row in rows}
    members = case.runs.members.tolist()
    found = {row: [] for row in range(len(lengths))}
    pieces = case.pieces.tolist()
    real = [piece for piece in pieces if piece[0] >= 0]
    of_runs = [piece for piece in real if piece[5]]
    assert real[: len(of_runs)] == of_runs
    assert len(of_runs) <= max_prefix_splits(len(lengths), cut, case.seats), "what a launch reaches"
    assert pieces[: len(real)] == real and all(piece[0] == -1 for piece in pieces[len(real) :])
    for number, (row, start, stop, split, begin, count) in enumerate(real):
        rows = members[begin : begin + count] if count else [row]
        assert start < stop and 0 <= count <= case.seats
        for seat, one in enumerate(rows):
            found[one] += range(start, stop)
            every, first, run_first, run_pieces, its_seat = case.runs.merges[one].tolist()
            if count:
                assert run_first <= number < run_first + run_pieces and its_seat == seat
            else:
                assert (first, every - run_pieces) == (split & 0xFFFF, split >> 16)
                assert start >= runs.get(row, 0)
    assert {row: sorted(keys) for row, keys in found.items()} == {
        row: list(range(length)) for row, length in enumerate(lengths)
    }


def test_as_many_runs_as_may_be_find_room():
    lengths, groups = (
        [40] * 2 * MAX_SHARED_PREFIXES,
        [([2 * n, 2 * n + 1], 32) for n in range(MAX_SHARED_PREFIXES)],
    )
    case = SharedCase(lengths, groups, TILED)
    assert relative_error(case.run_shared(), case.expected()) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("cut", [TILED, WIDE, APART])
@pytest.mark.parametrize(("lengths", "groups"), SHARING)
def test_rows_with_a_common_beginning_attend_as_rows_alone_do(lengths, groups, cut, dtype):
    case = SharedCase(lengths, groups, cut, dtype=dtype)
    got, there = case.run_shared(), case.lengths > 0
    assert relative_error(got[there], case.expected()[there]) < 3 * TOLERANCE[dtype]
    assert got[~there].isnan().all()
    assert not case.scratch.counters.any()
    if not INTERPRETED or dtype == torch.float32:  # what a run leaves is of no type of q
        assert torch.equal(case.run_shared()[there], got[there])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(5, 1, 64, 1), (32, 2, 16, 64), (12, 2, 32, 16)]
)
def test_groups_of_heads_need_not_fill_a_tile(heads, kv_heads, dim, page):
    kinds = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page": page}
    case = SharedCase([140, 129, 200, 131, 7, 300], [([0, 1, 3, 5], 128)], TILED, **kinds)
    assert relative_error(case.run_shared(), case.expected()) < 3e-6


@pytest.mark.parametrize("cut", [TILED, WIDE, APART])
def test_whoever_comes_last_merges(cut):
    """Here the pieces of runs do, which come first else."""
    case = SharedCase([100] * 9 + [300, 3, 280], [([*range(9)], 96), ([9, 11], 256)], cut)
    expected = case.run_shared()
    pieces, out = case.pieces.clone(), torch.full_like(case.q, float("nan"))
    case.pieces[pieces[:, 5] > 0, 0] = -1
    case.attend(out)
    assert out[9].isnan().all() and not out[10].isnan().any()
    case.pieces.copy_(pieces)
    case.pieces[pieces[:, 5] == 0, 0] = -1
    assert torch.equal(case.attend(out), expected)
    assert not case.scratch.counters.any()


def test_sinks_count_once_in_a_row_with_a_run():
    case = SharedCase([70, 90, 33], [([0, 1], 64)], TILED, heads=4)
    sinks = torch.tensor([0.0, -3.0, 2.5, 80.0], device=DEVICE)
    assert relative_error(case.run_shared(sinks), case.expected(None, sinks)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_runs_in_8_bits(dtype):
    case = SharedCase([70, 90, 33], [([0, 1], 64)], TILED, dtype=dtype)
    case.in_8_bits(KVScales(0.5, 3.0))
    assert relative_error(case.run_shared(), case.expected()) < 3 * TOLERANCE[dtype]


def test_large_queries_have_room_as_halves():
    """Of 2e5, more than a half has; their scores differ by a little."""
    case = Case([40], torch.bfloat16, heads=1, kv_heads=1).in_8_bits(UNIT_KV_SCALES)
    case.q.fill_(2e5)
    case.k.view(torch.uint8).zero_()
    case.k[:, ::2] = torch.tensor(2.0**-9, device=DEVICE).to(E4M3)
    got, expected = case.run(WHOLE), case.expected()
    assert relative_error(got, expected) < 3 * TOLERANCE[torch.bfloat16]


def test_a_nan_in_one_rows_own_keys_stays_its_own_business():
    case = SharedCase([70, 90, 80], [([0, 1, 2], 64)], TILED)
    clean = case.run_shared()
    case.v[case.indices[int(case.indptr[1]) + 5].long(), 2] = float("nan")
    got = case.run_shared()
    assert got[1].isnan().any() and torch.equal(got[[0, 2]], clean[[0, 2]])


def test_sinks_and_a_nan_of_8_bits():
    case = Case(LENGTHS, heads=4).in_8_bits(KVScales(2.0, 0.1))
    sinks = torch.tensor([0.0, -3.0, 2.5, 80.0], device=DEVICE)
    clean = case.run(SPLITS, None, sinks)
    assert relative_error(clean, case.expected(None, sinks)) < 3e-6
    case.v.view(torch.uint8)[case.indices[int(case.indptr[3])].long(), 2] = 0x7F
    got = case.run(SPLITS, None, sinks)
    assert got[3].isnan().any(dim=-1).all()
    assert torch.equal(got[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])

"""The torch backend against attention computed query by query in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, attention_inputs, dense, make_case

from pipeinfer.attention import torch_backend
from pipeinfer.attention.torch_backend import TorchBackend
from pipeinfer.step import AttentionShape

CPU = torch.device("cpu")
HEADS = [(4, 4), (4, 2), (6, 1), (1, 1)]


def attend(case: Case) -> list[torch.Tensor]:
    """Outputs of all layers, in order, with one metadata."""
    backend = TorchBackend(case.shapes, CPU)
    backend.bind(case.pool, 100)
    with torch.inference_mode():
        metadata = backend.build_metadata(attention_inputs(case.step, case.pages))
        return [
            backend.attend(layer, case.queries[layer], *case.stored(layer), metadata)
            for layer in range(len(case.shapes))
        ]


def shape(heads: tuple[int, int] = (4, 2), window: int | None = None) -> AttentionShape:
    return AttentionShape(*heads, head_dim=8, scale=8**-0.5, sliding_window=window)


def assert_right(case: Case, tolerance: float = 2e-6) -> None:
    for layer, out in enumerate(attend(case)):
        expected = dense(case, layer)
        assert out.shape == expected.shape
        assert torch.isfinite(out).all()
        assert float((out - expected).abs().max()) < tolerance


decode_rows = st.lists(st.tuples(st.integers(0, 150), st.just(1)), max_size=8)
prefill_rows = st.lists(st.tuples(st.integers(0, 60), st.integers(2, 40)), max_size=3)
fresh_rows = st.lists(st.tuples(st.just(0), st.integers(2, 40)), max_size=2)


@settings(max_examples=40, deadline=None)
@given(
    decode_rows,
    prefill_rows,
    fresh_rows,
    st.sampled_from([1, 16, 64]),
    st.sampled_from(HEADS),
    st.lists(st.sampled_from([None, 1, 5, 17, 64, 1000]), min_size=1, max_size=3),
    st.integers(0, 2**31),
)
def test_any_mix_of_rows_equals_dense_attention(
    decodes, prefills, fresh, page_size, heads, windows, seed
):
    spans = [*decodes, *prefills, *fresh]
    if spans:
        shapes = [shape(heads, window) for window in windows]
        assert_right(make_case(shapes, spans, page_size, seed))


@pytest.mark.parametrize("window", [None, 7, 128, 200])
def test_long_rows_are_cut_into_groups_and_pieces_without_a_seam(window):
    spans = [(length, 1) for length in (3, 700, 701, 90, 88, 85, 2300)] + [(130, 333), (0, 300)]
    assert_right(make_case([shape(window=window)], spans, 16, seed=1))


@pytest.mark.parametrize("heads", HEADS)
def test_heads_with_sinks_attend_to_less_than_all(heads):
    spans = [(40, 1), (3, 1), (0, 1), (90, 1), (20, 9), (0, 12), (0, 30)]
    sinks = torch.linspace(-4, 6, heads[0])
    shapes = [replace(shape(heads, window), sinks=sinks) for window in (None, 6, 200)]
    assert_right(make_case(shapes, spans, 16, 5))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sinks", [False, True])
def test_scores_are_capped_before_they_are_hidden_or_weighed(heads, sinks):
    spans = [(40, 1), (3, 1), (0, 1), (90, 1), (20, 9), (0, 12), (0, 30)]
    with_sinks = torch.linspace(-1, 1, heads[0]) if sinks else None
    shapes = [
        replace(shape(heads, window), soft_cap=0.5, sinks=with_sinks) for window in (None, 6, 200)
    ]
    assert_right(make_case(shapes, spans, 16, 5))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_pools_attend_within_their_precision(dtype, tolerance):
    spans = [(40, 1), (3, 1), (20, 9), (0, 12)]
    case = make_case([shape(), shape(window=6)], spans, 16, 3, dtype)
    assert_right(case, tolerance)


def test_queries_that_are_views_of_a_merged_buffer_are_taken_as_they_are():
    case = make_case([shape()], [(9, 1), (30, 1), (0, 6), (4, 5)], 16, seed=4)
    merged = torch.cat([case.queries[0], *case.stored(0)], dim=1)
    backend = TorchBackend(case.shapes, CPU)
    backend.bind(case.pool, 100)
    with torch.inference_mode():
        metadata = backend.build_metadata(attention_inputs(case.step, case.pages))
        out = backend.attend(0, merged[:, :4], merged[:, 4:6], merged[:, 6:], metadata)
    assert float((out - dense(case, 0)).abs().max()) < 2e-6


def test_decode_behind_a_window_reads_no_page_outside_it():
    backend = TorchBackend([shape(window=20)], CPU)
    case = make_case([shape(window=20)], [(1000, 1), (64, 1), (10, 1), (500, 30)], 16, seed=5)
    backend.bind(case.pool, 100)
    within = backend.build_metadata(attention_inputs(case.step, case.pages))[20]
    read = torch.cat(
        [bucket.kv_locations for bucket in within.buckets]
        + [chunk.kv_locations for chunk in within.chunks if chunk.kv_locations is not None]
    )
    allowed = {0}
    spans = zip(case.step.starts, case.step.counts, case.pages, strict=True)
    for start, count, pages in spans:
        first = max(int(start) + 1 - 20, 0) // 16
        allowed.update(int(page) for page in pages[first : -(-int(start + count) // 16)])
    assert set((read // 16).tolist()) <= allowed


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=80))
def test_length_buckets_hold_every_row_once_and_little_padding(lengths):
    array = np.array(lengths)
    order, bounds = torch_backend.length_buckets(array)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == len(lengths)
    for begin, end in bounds:
        bucket = array[order[begin:end]]
        assert bucket[0] == bucket.max()
        assert bucket.min() >= bucket.max() * torch_backend.BUCKET_SHORTEST
        assert end - begin == 1 or len(bucket) * bucket.max() <= torch_backend.BUCKET_TOKENS

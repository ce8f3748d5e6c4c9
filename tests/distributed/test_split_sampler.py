"""Ranks that hold a part of the vocabulary each sample what one that holds all of it samples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_ids import NOTHING, ids_of, knobs_of, sample
from pipeinfer.engine.sampling import ShardedSampler, truncated
from pipeinfer.engine.step_builder import filled
from pipeinfer.kernels import host
from rank_threads import ThreadCollectives, ThreadGroup
from sampling_rows import SamplingRows


def rows(count: int, rng: np.random.Generator, kinds: list[int]) -> SamplingRows:
    """Row r is greedy (0), has a temperature (1), is truncated as well (2), or has what truncates
    and is greedy (3)."""
    kind = np.array(kinds)
    values = filled(
        count,
        temperature=np.where(kind % 3 > 0, rng.uniform(0.3, 1.5, count), 0),
        top_k=np.where(kind > 1, rng.integers(0, 30, count), 0),
        top_p=np.where(kind > 1, rng.uniform(0.2, 1, count), 1),
        seed=rng.integers(0, 2**63, count),
    )
    return SamplingRows(values, rng.integers(0, 2**40, count))


def split(logits: np.ndarray, params: SamplingRows, size: int, group: ThreadGroup):
    vocab = logits.shape[1]
    share = -(-vocab // size)
    padded = np.zeros((len(logits), share * size), dtype=np.float32)
    padded[:, :vocab] = logits

    def one(ranks: ThreadCollectives) -> list[int]:
        rank = ranks.rank
        start = min(rank * share, vocab)
        held = SimpleNamespace(start=start, stop=min(start + share, vocab), vocab_size=vocab)
        model = SimpleNamespace(vocab_shard=held, local_logits=None)
        sampler = ShardedSampler(model, ranks, host)
        part = torch.from_numpy(padded[:, rank * share : (rank + 1) * share].copy())
        last_token = torch.full((len(part),), -5)
        drawn = sampler.sample(part, knobs_of(params), last_token, truncated(params.fields))
        assert torch.equal(last_token, drawn[:, 1])
        return ids_of(drawn).tolist()

    return group.run(one)


def test_greedy_rows_are_not_truncated_whatever_their_checkpoint_says():
    """All logits of a truncated row are gathered, and on a GPU it is sampled a second time."""
    fields = filled(3, temperature=[0, 0.6, 1e-6], top_k=[20] * 3, top_p=[0.9] * 3, min_p=[0.1] * 3)
    assert truncated(fields).tolist() == [1]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(7, 300), st.sampled_from([2, 3, 4, 8]),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)  # fmt: skip
def test_parts_sample_what_the_whole_samples(seed, vocab, size, kinds):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(kinds), vocab)) * 3).astype(np.float32)
    params = rows(len(kinds), rng, kinds)
    expected = sample(torch.from_numpy(logits), params).tolist()
    for ids in split(logits, params, size, ThreadGroup(size)):
        assert ids == expected


def test_the_lowest_of_equal_ids_wins_across_ranks():
    logits = np.zeros((1, 40), dtype=np.float32)
    logits[0, [9, 25, 33]] = 2.0
    params = rows(1, np.random.default_rng(0), [0])
    assert split(logits, params, 4, ThreadGroup(4)) == [[9]] * 4


def test_plain_rows_cost_three_numbers_a_rank_whatever_the_vocabulary():
    rng = np.random.default_rng(1)
    group = ThreadGroup(2)
    split(rng.standard_normal((5, 999)).astype(np.float32), rows(5, rng, [0, 1, 0, 1, 1]), 2, group)
    assert group.exchanged == 5 * 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_row_that_is_bad_on_one_rank_is_bad_on_all_and_leaves_the_others_alone(value, kind):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((6, 160)).astype(np.float32)
    params = rows(6, rng, [0, kind, 1, 2, kind, 2])
    expected = sample(torch.from_numpy(logits), params).tolist()
    if value == -np.inf:
        logits[1] = logits[4] = value
    else:
        logits[1, 130] = logits[4, 3] = value
    expected[1] = expected[4] = NOTHING
    assert split(logits, params, 4, ThreadGroup(4)) == [expected] * 4

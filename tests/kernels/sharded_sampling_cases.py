"""Ranks that offer their best candidates choose what one rank samples: interpreter and GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from drawn_ids import NOTHING, ids_of
from kernels.sampling_cases import NAMES, mixed, parameters, sample
from kernels.triton_cases import DEVICE, randn
from pipeinfer.engine.sampling import ShardedSampler
from pipeinfer.engine.step_builder import FIELDS
from pipeinfer.kernels import by_triton, sampling
from pipeinfer.kernels.sampling import global_argmax, local_argmax


def together(logits, knobs, ranks, **target):
    """Ids by so many ranks, each with an equal run of the vocabulary, the last ones with less."""
    temperature, *_, seeds, positions = knobs
    vocab = logits.shape[1]
    share = -(-vocab // ranks)
    starts = [min(rank * share, vocab) for rank in range(ranks)]
    parts = [(start, logits[:, start : start + share]) for start in starts]
    offers = [local_argmax(part, temperature, seeds, positions, start) for start, part in parts]
    return ids_of(global_argmax(torch.stack(offers), temperature, **target))


@pytest.mark.parametrize(
    ("vocab", "ranks", "dtype"),
    [(5, 4, torch.bfloat16), (263, 2, torch.float32), (300, 3, torch.bfloat16),
     (2001, 4, torch.float32)],
)  # fmt: skip
def test_ranks_choose_what_one_rank_samples(vocab, ranks, dtype, monkeypatch):
    """A share of 2, 132, 100 or 501 ids: noise is made for four at a time, wherever they lie."""
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 256)
    logits = randn(vocab, 8, vocab, dtype=dtype) * 3
    knobs = parameters(8, vocab, temperature=[0, 0, 0.3, 0.6, 1, 1, 1.7, 5])
    ids = together(logits, knobs, ranks)
    assert ids.tolist() == sample(logits, *knobs, truncate=False).tolist()


def test_the_lowest_of_equal_logits_wins_across_ranks_and_blocks(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 16)
    logits = torch.full((3, 200), -4.0, device=DEVICE)
    for row, equal in enumerate(([90, 30, 199], [150, 151], [160, 40, 41])):
        logits[row, equal] = 2.5
    assert together(logits, parameters(3, temperature=0), 4).tolist() == [30, 150, 40]


def test_bad_logits_of_one_rank_leave_no_id_on_all_and_hurt_no_other_row(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 64)
    logits = randn(3, 6, 500)
    knobs = parameters(6, temperature=[1, 0, 1, 1, 0, 1])
    good = sample(logits, *knobs, truncate=False)
    logits[0, 499], logits[1, 3] = float("nan"), float("nan")
    logits[2, 130], logits[3, :] = float("inf"), float("-inf")
    last_token = torch.full((8,), 7, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(6, device=DEVICE) + 1
    ids = together(logits, knobs, 4, last_token=last_token, slots=slots)
    assert ids.tolist() == [NOTHING] * 4 + good[4:].tolist()
    assert last_token.tolist() == [7, 0, 0, 0, 0, *good[4:].tolist(), 7]


def test_a_rank_that_may_offer_nothing_is_never_chosen(monkeypatch):
    """All of its ids are suppressed, or it has none at all."""
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 64)
    logits = randn(4, 5, 64)
    logits[:, :32] = float("-inf")
    knobs = parameters(5, temperature=[0, 1, 2, 1, 0])
    expected = sample(logits, *knobs, truncate=False).tolist()
    assert min(expected) >= 32
    assert together(logits, knobs, 2).tolist() == expected
    assert together(logits[:, :33], knobs, 16).tolist() == [32] * 5


def test_offers_stay_small_and_rows_are_the_same_in_any_batch(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 256)
    logits = randn(6, 9, 500, dtype=torch.bfloat16)
    temperature, *_, seeds, positions = mixed(9, 500, 5)
    whole = local_argmax(logits, temperature, seeds, positions, 5001)
    assert whole.shape == (9, 2)
    alone = local_argmax(logits[3:4], temperature[3:4], seeds[3:4], positions[3:4], 5001)
    assert torch.equal(alone[0], whole[3])
    none = local_argmax(logits[:0], temperature[:0], seeds[:0], positions[:0], 0)
    assert global_argmax(torch.stack([none, none]), temperature[:0]).shape == (0, 2)


class OneRank:
    """Stands for all ranks, and remembers how many rows were put together."""

    def __init__(self):
        self.gathered = []

    def all_gather_stacked(self, partial):
        return partial[None]

    def all_gather(self, partial):
        self.gathered.append(len(partial))
        return partial


def test_ranks_gather_the_logits_of_truncated_rows_only(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 64)
    rows, vocab, ranks = 7, 200, OneRank()
    logits = randn(7, rows, vocab)
    knobs = parameters(rows, 8, top_k=[0, 3, 0, 0, 5, 0, 0], top_p=[1, 1, 1, 0.5, 1, 1, 1])
    names = (*NAMES, "sample_positions")
    views = dict(zip(names, knobs, strict=True)) | {"write_slots": torch.arange(rows).to(DEVICE)}
    assert {field.name for field in FIELDS} < set(views)
    held = SimpleNamespace(start=0, stop=vocab, vocab_size=vocab)
    model = SimpleNamespace(vocab_shard=held, local_logits=None)
    last_token = torch.full((rows,), -5, dtype=torch.int64, device=DEVICE)
    sampler = ShardedSampler(model, ranks, by_triton)
    ids = ids_of(sampler.sample(logits, views, last_token, np.array([1, 3, 4])))
    assert ranks.gathered == [3]
    assert ids.tolist() == sample(logits, *knobs).tolist() == last_token.tolist()
    sampler.sample(logits, views, last_token, np.empty(0, dtype=np.int64))
    assert ranks.gathered == [3]

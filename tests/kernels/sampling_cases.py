"""Sampling on the device against its reference and the CPU's sampler: for interpreter and GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import drawn_ids
from drawn_ids import NOTHING, ids_of
from draws import numbers, seeded
from kernels.triton_cases import DEVICE, INTERPRETED, randn
from pipeinfer.engine.sampling import ShardedSampler
from pipeinfer.engine.step_builder import FIELDS
from pipeinfer.kernels import by_triton, host, sampling
from pipeinfer.kernels.sampling import global_argmax, local_argmax, sample_reference
from sampling_rows import SamplingRows

NAMES = ("temperature", "top_k", "top_p", "min_p", "seed")
SEEDS = np.array([0, 1, 2**63, 2**64 - 1, 0x299F31D0A4093822], dtype=np.uint64)
POSITIONS = np.array([0, 7, 2**31, 2**32 + 5, 2**40], dtype=np.int64)


@triton.jit
def _draw(seeds, positions, words, variates, single, COUNT: tl.constexpr):
    row = tl.program_id(0)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    counters = tl.arange(0, COUNT // 4)
    w0, w1, w2, w3 = sampling.philox_words(seed, position, counters)
    at = row * COUNT + counters * 4
    tl.store(words + at, w0.to(tl.int64))
    tl.store(words + at + 1, w1.to(tl.int64))
    tl.store(words + at + 2, w2.to(tl.int64))
    tl.store(words + at + 3, w3.to(tl.int64))
    tl.store(variates + at, sampling.gumbel_noise(w0))
    tl.store(variates + at + 1, sampling.gumbel_noise(w1))
    tl.store(variates + at + 2, sampling.gumbel_noise(w2))
    tl.store(variates + at + 3, sampling.gumbel_noise(w3))
    ids = tl.arange(0, COUNT)
    tl.store(single + row * COUNT + ids, sampling.gumbel_noise_at(seed, position, ids))


@triton.jit
def _convert(words, uniforms, variates, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    word = tl.load(words + at).to(tl.uint32)
    tl.store(uniforms + at, sampling.uniform_of_word(word))
    tl.store(variates + at, sampling.gumbel_noise(word))


def parameters(rows: int, seed: int = 0, **values):
    """[temperature, top_k, top_p, min_p, seeds, positions] on the device; values broadcast."""
    choose = numbers(seed)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    columns = [np.broadcast_to(np.asarray(defaults[k], t), rows).copy() for k, t in kinds.items()]
    columns.append(choose.integers(0, 2**64, rows, dtype=np.uint64).view(np.int64))
    columns.append(choose.integers(0, 2**34, rows))
    return [torch.from_numpy(column).to(DEVICE) for column in columns]


def sample(*arguments, **named) -> torch.Tensor:
    """Ids, int64 [L]."""
    return ids_of(sampling.sample(*arguments, **named))


def on_the_cpu(logits: torch.Tensor, knobs: list[torch.Tensor]) -> torch.Tensor:
    """What the engine's CPU sampler says."""
    *fields, seeds, positions = [knob.cpu().numpy() for knob in knobs]
    values = dict(zip(NAMES, (*fields, seeds.view(np.uint64)), strict=True))
    rows = SamplingRows(values, positions)
    return drawn_ids.sample(logits, rows)


def assert_all_agree(logits: torch.Tensor, knobs: list[torch.Tensor]) -> torch.Tensor:
    ids = sample(logits, *knobs)
    assert ids.tolist() == ids_of(sample_reference(logits, *knobs)).tolist()
    assert ids.tolist() == on_the_cpu(logits, knobs).tolist()
    return ids


def mixed(rows: int, vocab: int, seed: int = 0) -> list[torch.Tensor]:
    """Parameters of all kinds, some rows with none."""
    choose = numbers(seed)
    return parameters(
        rows,
        seed,
        temperature=choose.choice([0, 0.6, 1, 2], rows),
        top_k=choose.choice([0, 1, 3, 40, vocab], rows),
        top_p=choose.choice([1, 0.1, 0.9, 0.999], rows),
        min_p=choose.choice([0, 0, 0.013, 0.3], rows),
    )


def test_words_are_those_of_the_reference_bit_for_bit_and_variates_almost():
    rows, count = len(SEEDS), 64
    words = torch.empty(rows, count, dtype=torch.int64, device=DEVICE)
    variates = torch.empty(rows, count, device=DEVICE)
    single = torch.empty(rows, count, device=DEVICE)
    seeds = torch.from_numpy(SEEDS.view(np.int64)).to(DEVICE)
    _draw[(rows,)](
        seeds, torch.from_numpy(POSITIONS).to(DEVICE), words, variates, single, COUNT=count
    )
    lanes = host.philox_words(SEEDS[:, None], POSITIONS[:, None], np.arange(count // 4)[None])
    assert np.array_equal(words.cpu(), np.stack(lanes, axis=-1).reshape(rows, count))
    expected = host.gumbel_noise(SEEDS, POSITIONS, count)
    assert np.abs(variates.cpu().numpy() - expected).max() < 6e-6
    assert torch.equal(single, variates)


def test_uniforms_are_exact_and_variates_close_over_the_whole_range():
    choose = numbers(0)
    words = choose.integers(0, 2**32, 8192, dtype=np.int64) >> choose.integers(0, 32, 8192)
    words[:4] = 0, 1, 2**31, 2**32 - 1
    uniforms, variates = torch.empty(2, 8192, device=DEVICE)
    _convert[(1,)](torch.from_numpy(words).to(DEVICE), uniforms, variates, COUNT=8192)
    exact = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    assert np.array_equal(uniforms.cpu(), np.minimum(exact, host.LARGEST_UNIFORM))
    expected = -np.log(-np.log1p(-uniforms.cpu().double().numpy()))
    assert np.abs(variates.cpu().numpy() - expected).max() < 6e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 300, 9001])
def test_rows_without_restriction_agree_with_the_references(vocab, dtype):
    logits = randn(vocab, 8, vocab, dtype=dtype) * 3
    temperature = [0, 0, 0.3, 0.6, 1, 1, 1.7, 5]
    knobs = parameters(8, vocab, temperature=temperature)
    ids = assert_all_agree(logits, knobs)
    assert ids[:2].tolist() == logits[:2].argmax(-1).tolist()
    assert torch.equal(sample(logits, *knobs, truncate=False), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("candidates", "per_block"), [(1024, 256), (8, 256), (1024, 2)],
    ids=["few candidates", "too many of a row", "too many of a block"],
)  # fmt: skip
def test_restricted_rows_agree_with_the_references(candidates, per_block, dtype, monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 256)
    monkeypatch.setattr(sampling, "ROW_CHUNK", 1024)
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", candidates)
    monkeypatch.setattr(sampling, "MAX_PER_BLOCK", per_block)
    vocab = 1200
    logits = randn(1, 10, vocab, dtype=dtype) * 3
    assert_all_agree(logits, mixed(10, vocab, 1))


def test_candidates_that_stand_together_in_one_block_are_all_found(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 256)
    monkeypatch.setattr(sampling, "ROW_CHUNK", 1024)
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 256)
    logits = randn(3, 8, 1500, dtype=torch.bfloat16)
    logits[:, 512:730] += 12
    ids = assert_all_agree(
        logits, parameters(8, top_p=[0.99, 0.9, 0.5, 1] * 2, top_k=[0, 0, 0, 5] * 2)
    )
    assert ((ids >= 512) & (ids < 730)).all()


def test_large_top_k_and_flat_logits_agree_with_the_references(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_CANDIDATES", 512)
    vocab = 6000
    logits = randn(2, 6, vocab, dtype=torch.bfloat16) * 0.1
    knobs = parameters(
        6,
        top_k=[1000, 0, 5999, 2, 0, 0],
        top_p=[1, 0.5, 0.7, 1, 1, 0.99],
        min_p=[0, 0, 0, 0, 0.9, 0],
    )
    assert_all_agree(logits, knobs)


def test_of_equal_logits_the_lowest_id_is_greedy_and_all_survive_top_k(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 128)
    monkeypatch.setattr(sampling, "ROW_CHUNK", 512)
    logits = torch.full((1, 300), -3.0, device=DEVICE)
    logits[0, [70, 71, 290]] = 2.0
    assert sample(logits, *parameters(1, temperature=0)).tolist() == [70]
    rows = 20
    drawn = sample(logits.expand(rows, -1), *parameters(rows, top_k=2))
    assert set(drawn.tolist()) == {70, 71, 290}
    negative_zero = torch.tensor([[-0.0, 0.0, -5.0]], device=DEVICE).expand(rows, -1)
    assert set(sample(negative_zero, *parameters(rows, top_k=1)).tolist()) == {0, 1}


def test_a_row_without_a_finite_maximum_gets_no_id_and_hurts_nobody():
    logits = randn(3, 7, 5000)
    good = sample(
        logits, *parameters(7, temperature=[1, 0, 1, 1, 1, 1, 0], top_k=[0, 0, 9, 0, 9, 0, 0])
    )
    logits[0, 4999], logits[1, 17], logits[2, 3] = [float("nan")] * 3
    logits[3, 1], logits[4, 1] = [float("inf")] * 2
    last_token = torch.full((9,), 7, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(7, device=DEVICE, dtype=torch.int32) + 1
    ids = sample(
        logits, *parameters(7, temperature=[1, 0, 1, 1, 1, 1, 0], top_k=[0, 0, 9, 0, 9, 0, 0]),
        last_token=last_token, slots=slots,
    )  # fmt: skip
    assert ids.tolist() == [NOTHING] * 5 + good[5:].tolist()
    assert last_token.tolist() == [7, 0, 0, 0, 0, 0, *good[5:].tolist(), 7]


def test_suppressed_ids_are_never_drawn_even_where_whole_blocks_are(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 16)
    logits = torch.full((8, 64), float("-inf"), device=DEVICE)
    logits[:, [33, 50]] = torch.tensor([0.0, -1.0], device=DEVICE)
    knobs = parameters(8, top_k=[0, 0, 0, 1, 5, 0, 0, 0], top_p=[1, 1, 1, 1, 1, 0.9, 0.99, 1],
                       temperature=[0, 1, 3, 1, 1, 1, 1, 1])  # fmt: skip
    assert set(assert_all_agree(logits, knobs).tolist()) <= {33, 50}


def test_ids_reach_last_token_at_the_rows_slots_only():
    logits = randn(5, 4, 100, dtype=torch.bfloat16)
    last_token = torch.full((10,), -5, dtype=torch.int64, device=DEVICE)
    slots = torch.tensor([7, 2, 9, 0], device=DEVICE)
    out = torch.empty(4, 2, dtype=torch.int64, device=DEVICE)
    knobs = parameters(4, top_k=[0, 3, 0, 3])
    assert sampling.sample(logits, *knobs, last_token=last_token, slots=slots, out=out) is out
    assert last_token[slots].tolist() == ids_of(out).tolist()
    assert last_token[[1, 3, 4, 5, 6, 8]].tolist() == [-5] * 6


def test_a_row_samples_the_same_alone_and_anywhere_in_a_batch():
    vocab = 2500 if INTERPRETED else 5000
    logits = randn(6, 16, vocab, dtype=torch.bfloat16)
    knobs = mixed(16, vocab, 5)
    together = sample(logits, *knobs)
    order = torch.randperm(16, generator=seeded(1)).to(DEVICE)
    assert torch.equal(sample(logits[order], *[knob[order] for knob in knobs]), together[order])
    for row in (0, 7, 15):
        alone = sample(logits[row : row + 1], *[knob[row : row + 1] for knob in knobs])
        assert alone.tolist() == [int(together[row])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 0.8, 0.9, 1.3])
def test_scores_are_the_same_bits_whether_another_row_is_restricted(temperature, dtype):
    """With a temperature such as 0.7 a product that is not rounded before noise is added shows."""
    rows, vocab = 4, 5000
    logits = randn(7, rows, vocab, dtype=dtype)
    *fields, seeds, positions = parameters(rows, 3, temperature=temperature)
    blocks = triton.cdiv(vocab, sampling.SAMPLING_BLOCK)
    found = []
    for truncate in (False, True):
        largest, sums = logits.new_empty(2, rows, blocks, dtype=torch.float32)
        best = logits.new_empty(rows, blocks, dtype=torch.int64)  # with the bits of the best score
        sampling._scan_blocks[(rows, blocks)](
            logits, *fields, seeds, positions, largest, sums, best, logits.stride(0), vocab, blocks,
            0, 0, BLOCK=sampling.SAMPLING_BLOCK, TRUNCATE=truncate, SHARDED=False,
            num_warps=sampling.SCAN_WARPS, **sampling.ROUNDING,
        )  # fmt: skip
        found.append(best)
    assert torch.equal(*found)


def test_a_tiny_temperature_does_not_overflow():
    logits = torch.tensor([[-3e38, 0.0, 3e38], [1.0, 2.0, 1.5]], device=DEVICE)
    assert sample(logits, *parameters(2, temperature=[0.01, 1.1e-5])).tolist() == [2, 1]
    assert sample(logits, *parameters(2, temperature=[0.01, 1.1e-5], top_p=0.5)).tolist() == [2, 1]


def test_an_empty_batch_gives_no_ids():
    empty = torch.empty(0, 10, device=DEVICE)
    assert sample(empty, *parameters(0)).shape == (0,)


def test_top_k_counts_right_where_every_block_has_one_candidate(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 16)
    monkeypatch.setattr(sampling, "ROW_CHUNK", 128)
    rows = 20
    logits = torch.full((rows, 128), -50.0, device=DEVICE)
    logits[:, 5::16] = torch.tensor([3.0, 1.0, 7.0, 0.0, 2.0, 6.0, 5.0, 4.0], device=DEVICE)
    drawn = assert_all_agree(logits, parameters(rows, temperature=9, top_k=3))
    assert set(drawn.tolist()) == {2 * 16 + 5, 5 * 16 + 5, 6 * 16 + 5}


def test_min_p_of_one_leaves_the_maximum():
    logits = randn(8, 6, 300, dtype=torch.bfloat16)
    drawn = sample(logits, *parameters(6, temperature=3, min_p=1))
    # Any of those that are equal to it: bfloat16 has few values there.
    assert torch.equal(logits.gather(1, drawn[:, None])[:, 0], logits.amax(-1))


def test_a_top_p_too_small_for_float32_leaves_the_maximum(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLING_BLOCK", 64)
    logits = randn(9, 8, 300)
    top_p, top_k = [0, 1e-46, 1e-45, 1e-30] * 2, [0] * 4 + [9] * 4
    knobs = parameters(8, temperature=5, top_p=top_p, top_k=top_k)
    assert torch.equal(assert_all_agree(logits, knobs), logits.argmax(-1))


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

"""The sampler and its noise: what is left to choose from, how often each is
chosen, and no other influence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_ids import NOTHING, sample
from pipeinfer.engine.step_builder import filled
from pipeinfer.kernels import host
from pipeinfer.kernels import host as sampler
from pipeinfer.kernels.host import truncation_thresholds
from sampling_rows import SamplingRows


def rows(
    count: int,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    first_seed: int = 0,
) -> SamplingRows:
    return SamplingRows(
        filled(
            count,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=np.arange(first_seed, first_seed + count, dtype=np.uint64),
        ),
        np.arange(count, dtype=np.int64) % 7,
    )


def kept(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The ids that truncation leaves of one row."""
    x = logits.astype(np.float32)[None] - np.float32(logits.max())
    floor = truncation_thresholds(x, np.array([top_k]), np.array([top_p]), np.array([min_p]))
    return np.flatnonzero(x[0] >= floor[0]).tolist()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# 99.99 % quantiles of the chi-square distribution, by degrees of freedom.
QUANTILE = {2: 18.42, 3: 21.11, 4: 23.51, 9: 33.72, 19: 50.80}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_come_as_often_as_their_probability_says(temperature):
    logits = torch.linspace(-2, 1, 20).expand(20_000, -1)
    counts = np.bincount(sample(logits, rows(20_000, temperature)).numpy(), minlength=20)
    probabilities = (logits[0] / temperature).softmax(-1).double().numpy()
    assert chi_square(counts, probabilities) < QUANTILE[19]


@pytest.mark.parametrize(
    ("options", "survivors"),
    [({"top_k": 4}, 4), ({"top_p": 0.8}, 4), ({"min_p": 0.2}, 5), ({"top_k": 5, "top_p": 0.9}, 4)],
)
def test_survivors_of_truncation_keep_their_relative_probability(options, survivors):
    probabilities = np.array([0.40, 0.20, 0.12, 0.10, 0.08, 0.04, 0.03, 0.02, 0.007, 0.003])
    logits = torch.from_numpy(np.log(probabilities)).float().expand(20_000, -1)
    counts = np.bincount(sample(logits, rows(20_000, **options)).numpy(), minlength=10)
    assert (counts[survivors:] == 0).all()
    left = probabilities[:survivors] / probabilities[:survivors].sum()
    assert chi_square(counts[:survivors], left) < QUANTILE[survivors - 1]


def test_zero_temperature_takes_the_largest_logit_and_the_lowest_id_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0], [-1.0, -3.0, -0.5]])
    assert sample(logits, rows(3, temperature=0)).tolist() == [1, 0, 2]


def test_top_k_one_equals_greedy_at_any_temperature():
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, rows(50, 2.0, top_k=1)), logits.argmax(-1))


def test_a_tiny_temperature_does_not_overflow():
    logits = torch.tensor([[-3e38, 0.0, 3e38], [1.0, 2.0, 1.5]])
    assert sample(logits, rows(2, temperature=[0.01, 1.1e-5])).tolist() == [2, 1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([17, 264, 1000, 9001]))
def test_a_row_samples_the_same_alone_and_anywhere_in_a_batch(seed, vocab):
    choose = np.random.default_rng(seed)
    logits = torch.from_numpy(choose.normal(0, 2, (64, vocab)).astype(np.float32))
    everyone = rows(
        64,
        temperature=choose.choice([0, 0.3, 1, 3], 64),
        top_k=choose.choice([0, 1, 5, 600, 100_000], 64),
        top_p=choose.choice([1, 0.1, 0.9, 0.9999], 64),
        min_p=choose.choice([0, 0.01, 0.5, 1], 64),
        first_seed=seed,
    )
    together = sample(logits, everyone)
    order = choose.permutation(64)
    assert torch.equal(sample(logits[order], everyone.take(order)), together[order])
    for row in choose.choice(64, 8, replace=False):
        alone = np.array([row])
        assert sample(logits[alone], everyone.take(alone)) == together[row]


def test_blocks_of_rows_do_not_show_in_the_tokens(monkeypatch):
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(1))
    mixed = rows(40, top_k=[0, 30] * 20, top_p=[1.0, 1.0, 0.7, 0.7] * 10)
    together = sample(logits, mixed)
    monkeypatch.setattr(sampler, "LOGITS_PER_BLOCK", 1500)
    assert torch.equal(sample(logits, mixed), together)


def test_noise_for_few_and_for_all_candidates_is_the_same(monkeypatch):
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(2))
    mixed = rows(40, top_k=60)
    sparse = sample(logits, mixed)
    monkeypatch.setattr(sampler, "SPARSE_NOISE_COST", 10**9)
    assert torch.equal(sample(logits, mixed), sparse)


def test_another_seed_or_position_gives_other_tokens():
    logits = torch.zeros(64, 1000)
    first, other = rows(64), rows(64, first_seed=1000)
    assert (sample(logits, first) == sample(logits, other)).float().mean() < 0.1
    moved = rows(64)
    moved.positions[:] += 100
    assert (sample(logits, first) == sample(logits, moved)).float().mean() < 0.1


def test_top_k_keeps_equals_of_the_last_one():
    assert kept(np.array([1.0, 2.0, 3.0, 2.0, 0.0]), top_k=2) == [1, 2, 3]
    assert kept(np.array([1.0, 2.0, 3.0]), top_k=3) == [0, 1, 2]
    assert kept(np.array([1.0, 2.0, 3.0]), top_k=99) == [0, 1, 2]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-6, [0]), (0.49, [0]), (0.51, [0, 1]),
     (0.74, [0, 1]), (0.76, [0, 1, 2]), (0.99, [0, 1, 2, 3])],
)  # fmt: skip
def test_top_p_keeps_the_fewest_that_reach_it(top_p, expected):
    assert kept(np.log([0.5, 0.25, 0.15, 0.1]), top_p=top_p) == expected


def test_top_p_counts_what_top_k_left():
    # Of 0.4 / 0.3 / 0.2 / 0.1 top-k leaves 4/7 and 3/7: one is enough for 0.5, not for 0.6.
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(logits, top_k=2, top_p=0.5) == [0]
    assert kept(logits, top_k=2, top_p=0.6) == [0, 1]


def test_top_p_keeps_equals_of_the_last_one():
    assert kept(np.zeros(8), top_p=0.3) == list(range(8))


def test_min_p_is_relative_to_the_most_likely():
    logits = np.log([0.5, 0.26, 0.24])
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.0) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([5, 600, 5000]),
    st.sampled_from([0, 1, 3, 700]),
    st.floats(0.01, 1),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.2, 1, 4]),
)
def test_truncation_equals_the_definition_by_sorting(seed, vocab, top_k, top_p, min_p, spread):
    logits = np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    number = top_k if 0 < top_k < vocab else vocab
    shares = weights[:number] / weights[:number].sum()
    before = np.cumsum(shares) - shares
    if np.abs(before - top_p).min() < 1e-5:
        return  # decided by rounding
    inside = (before < top_p) & (weights[:number] >= min_p * 1.000001)
    assert kept(logits, top_k, top_p, min_p) == sorted(order[:number][inside].tolist())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), [float("-inf")] * 300])
@pytest.mark.parametrize("how", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_row_of_bad_logits_gets_no_id_and_leaves_the_others_as_they_were(bad, how):
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * 3
    params = rows(5, **how)
    expected = sample(logits, params).tolist()
    logits[2, 5 if isinstance(bad, float) else slice(None)] = torch.tensor(bad)
    expected[2] = NOTHING
    assert sample(logits, params).tolist() == expected


@pytest.mark.parametrize("top_p", [0.0, 1e-46, 1e-45, 1e-30])
def test_a_top_p_too_small_for_float32_leaves_the_best_candidate(top_p):
    logits = torch.randn(400, 700, generator=torch.Generator().manual_seed(2))
    assert kept(logits[0].numpy(), top_p=top_p) == [int(logits[0].argmax())]
    assert kept(logits[0].numpy(), top_k=5, top_p=top_p) == [int(logits[0].argmax())]
    drawn = sample(logits, rows(400, temperature=5, top_p=top_p))
    assert torch.equal(drawn, logits.argmax(-1))


def test_half_precision_logits_are_sampled_in_float32():
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(sample(logits, rows(30)), sample(logits.float(), rows(30)))


# Known answers of Philox4x32-10 from Random123's kat_vectors: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def hexadecimal(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, output):
    result = host.philox(hexadecimal(counter), hexadecimal(key))
    assert " ".join(f"{int(word[0]):08x}" for word in result) == output


def test_counter_and_key_are_made_of_id_position_and_seed_as_documented():
    seed, position, index = 0x299F31D0A4093822, 0x13198A2E85A308D3, 4 * 0x243F6A88 + 2
    counter = hexadecimal("243f6a88 85a308d3 13198a2e 00000000")
    expected = host.philox(counter, hexadecimal("a4093822 299f31d0"))[index % 4]
    seeds, positions = np.array([seed], np.uint64), np.array([position], np.int64)
    lanes = host.philox_words(seeds, positions, np.array([index // 4]))
    assert lanes[index % 4] == expected
    uniform = np.float32(expected[0]) * np.float32(2.0**-32) + np.float32(2.0**-33)
    value = host.gumbel_noise_at(seeds, positions, np.array([index]))
    assert value[0] == pytest.approx(-np.log(-np.log1p(-np.float64(uniform))), rel=1e-6)


def test_uniforms_and_gumbels_are_finite_for_the_extreme_words():
    words = np.array([0, 1, 2**31, 2**32 - 1], dtype=np.float32)
    host._to_gumbel(words)
    assert np.isfinite(words).all()
    assert words[0] == pytest.approx(33 * np.log(2), rel=1e-6)
    assert (np.diff(words) < 0).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=6),
    st.integers(1, 700),
    st.data(),
)
def test_noise_of_one_id_is_the_same_alone_and_in_any_batch(rows, vocab, data):
    seeds = np.array([seed for seed, _ in rows], dtype=np.uint64)
    positions = np.array([position for _, position in rows], dtype=np.int64)
    whole = host.gumbel_noise(seeds, positions, vocab)
    assert whole.shape == (len(rows), vocab)
    row = data.draw(st.integers(0, len(rows) - 1))
    index = data.draw(st.integers(0, vocab - 1))
    alone = host.gumbel_noise_at(seeds[[row]], positions[[row]], np.array([index]))
    assert alone[0] == whole[row, index]
    longer = host.gumbel_noise(seeds[[row]], positions[[row]], vocab + 5)
    assert np.array_equal(longer[0, :vocab], whole[row])


def test_blocks_do_not_show_in_the_noise(monkeypatch):
    seeds, positions = np.arange(9, dtype=np.uint64), np.arange(9)
    whole = host.gumbel_noise(seeds, positions, 50)
    ids = np.arange(9) * 5
    single = host.gumbel_noise_at(seeds, positions, ids)
    monkeypatch.setattr(host, "WORDS_PER_BLOCK", 100)
    assert np.array_equal(host.gumbel_noise(seeds, positions, 50), whole)
    assert np.array_equal(host.gumbel_noise_at(seeds, positions, ids), single)


def test_noise_follows_the_gumbel_distribution():
    drawn = np.sort(
        host.gumbel_noise(np.arange(20, dtype=np.uint64), np.arange(20), 5000).reshape(-1)
    )
    expected = np.exp(-np.exp(-drawn.astype(np.float64)))
    empirical = (np.arange(len(drawn)) + 0.5) / len(drawn)
    # Kolmogorov-Smirnov at 1e-4: 2.23 / sqrt(n)
    assert np.abs(expected - empirical).max() < 2.23 / np.sqrt(len(drawn))


def test_neighbouring_seeds_positions_and_ids_are_uncorrelated():
    base = host.gumbel_noise(np.array([1], np.uint64), np.array([1]), 40_000)[0]
    other_seed = host.gumbel_noise(np.array([2], np.uint64), np.array([1]), 40_000)[0]
    other_position = host.gumbel_noise(np.array([1], np.uint64), np.array([2]), 40_000)[0]
    for other in (other_seed, other_position, np.roll(base, 1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / np.sqrt(40_000)

"""The noise generator: known answers, independence of the batch, distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.kernels import noise

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
    result = noise.philox(hexadecimal(counter), hexadecimal(key))
    assert " ".join(f"{int(word[0]):08x}" for word in result) == output


def test_counter_and_key_are_made_of_id_position_and_seed_as_documented():
    seed, position, index = 0x299F31D0A4093822, 0x13198A2E85A308D3, 4 * 0x243F6A88 + 2
    counter = hexadecimal("243f6a88 85a308d3 13198a2e 00000000")
    expected = noise.philox(counter, hexadecimal("a4093822 299f31d0"))[index % 4]
    seeds, positions = np.array([seed], np.uint64), np.array([position], np.int64)
    lanes = noise.philox_words(seeds, positions, np.array([index // 4]))
    assert lanes[index % 4] == expected
    uniform = np.float32(expected[0]) * np.float32(2.0**-32) + np.float32(2.0**-33)
    value = noise.gumbel_noise_at(seeds, positions, np.array([index]))
    assert value[0] == pytest.approx(-np.log(-np.log1p(-np.float64(uniform))), rel=1e-6)


def test_uniforms_and_gumbels_are_finite_for_the_extreme_words():
    words = np.array([0, 1, 2**31, 2**32 - 1], dtype=np.float32)
    noise._to_gumbel(words)
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
    whole = noise.gumbel_noise(seeds, positions, vocab)
    assert whole.shape == (len(rows), vocab)
    row = data.draw(st.integers(0, len(rows) - 1))
    index = data.draw(st.integers(0, vocab - 1))
    alone = noise.gumbel_noise_at(seeds[[row]], positions[[row]], np.array([index]))
    assert alone[0] == whole[row, index]
    longer = noise.gumbel_noise(seeds[[row]], positions[[row]], vocab + 5)
    assert np.array_equal(longer[0, :vocab], whole[row])


def test_blocks_do_not_show_in_the_noise(monkeypatch):
    seeds, positions = np.arange(9, dtype=np.uint64), np.arange(9)
    whole = noise.gumbel_noise(seeds, positions, 50)
    ids = np.arange(9) * 5
    single = noise.gumbel_noise_at(seeds, positions, ids)
    monkeypatch.setattr(noise, "WORDS_PER_BLOCK", 100)
    assert np.array_equal(noise.gumbel_noise(seeds, positions, 50), whole)
    assert np.array_equal(noise.gumbel_noise_at(seeds, positions, ids), single)


def test_noise_follows_the_gumbel_distribution():
    drawn = np.sort(
        noise.gumbel_noise(np.arange(20, dtype=np.uint64), np.arange(20), 5000).reshape(-1)
    )
    expected = np.exp(-np.exp(-drawn.astype(np.float64)))
    empirical = (np.arange(len(drawn)) + 0.5) / len(drawn)
    # Kolmogorov-Smirnov at 1e-4: 2.23 / sqrt(n)
    assert np.abs(expected - empirical).max() < 2.23 / np.sqrt(len(drawn))


def test_neighbouring_seeds_positions_and_ids_are_uncorrelated():
    base = noise.gumbel_noise(np.array([1], np.uint64), np.array([1]), 40_000)[0]
    other_seed = noise.gumbel_noise(np.array([2], np.uint64), np.array([1]), 40_000)[0]
    other_position = noise.gumbel_noise(np.array([1], np.uint64), np.array([2]), 40_000)[0]
    for other in (other_seed, other_position, np.roll(base, 1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / np.sqrt(40_000)

"""The scatter of steps: drawn as it was found, by size, and alike for as long as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest

from simulate import fit
from simulate.step_model import Draws, Noise, Scatter

NOISE = Noise(
    scatter=(
        Scatter(0.0, tuple(np.linspace(0.4, 1.6, 100))),
        Scatter(2.0, tuple(np.linspace(0.9, 1.1, 100))),
    ),
    mixed=(Scatter(0.0, tuple(np.linspace(0.7, 1.3, 100))),),
    persistent=0.6,
    lasting=16.0,
)


def drawn(noise: Noise, said: np.ndarray, seed: int, mixed: np.ndarray | None = None) -> np.ndarray:
    draws = Draws(noise, random.Random(seed))
    kinds = [False] * len(said) if mixed is None else mixed.tolist()
    return np.array([one * draws.factor(one, kind) for one, kind in zip(said, kinds, strict=True)])


def test_steps_scatter_as_steps_of_their_size_and_kind_do():
    said, mixed = np.tile([1.0, 3.0, 3.0], 20_000), np.tile([False, False, True], 20_000)
    factors = drawn(NOISE, said, 0, mixed) / said
    for at, spread in ((0, 1.2), (1, 0.2), (2, 0.6)):
        mine = factors[at::3]
        assert mine.mean() == pytest.approx(1.0, abs=0.02)
        assert mine.std() == pytest.approx(spread / np.sqrt(12), rel=0.05)
        assert np.quantile(mine, 0.99) == pytest.approx(1 + 0.49 * spread, rel=0.02)


def test_a_slow_device_stays_slow_for_a_while():
    once = drawn(NOISE, np.ones(50_000), 1)
    alone = drawn(Noise(scatter=NOISE.scatter), np.ones(50_000), 1)
    for lag, wanted in ((1, 0.6 * np.exp(-1 / 16)), (16, 0.6 * np.exp(-1)), (100, 0.0)):
        assert np.corrcoef(once[lag:], once[:-lag])[0, 1] == pytest.approx(wanted, abs=0.05)
        assert np.corrcoef(alone[lag:], alone[:-lag])[0, 1] == pytest.approx(0.0, abs=0.03)


def test_noise_is_found_again_in_what_it_made():
    source = np.random.default_rng(0)
    said, mixed = source.uniform(0.5, 4.0, (2, 20_000)), source.random((2, 20_000)) < 0.3
    took = [drawn(NOISE, said[seed], seed, mixed[seed]) for seed in range(2)]
    found = fit.noise(took, list(said), list(mixed))
    assert found.persistent == pytest.approx(NOISE.persistent, abs=0.08)
    assert found.lasting == pytest.approx(NOISE.lasting, rel=0.45)  # powers of the root of 2
    again = [drawn(found, said[seed], 7 + seed, mixed[seed]) for seed in range(2)]
    assert np.sum(again) == pytest.approx(np.sum(took), rel=0.02)
    for of in (~mixed & (said < 1.2), ~mixed & (said > 2.6), mixed):
        ratios, wanted = (np.array(one)[of] / said[of] for one in (again, took))
        shares = (0.01, 0.5, 0.99)
        assert np.quantile(ratios, shares) == pytest.approx(np.quantile(wanted, shares), rel=0.06)


def test_few_steps_are_one_class_and_their_sum_is_kept():
    said = np.linspace(1.0, 2.0, 90)
    took = said * np.tile([0.5, 1.0, 2.1], 30)
    found = fit.noise([took], [said], [said < 1.1])
    (scatter,) = found.scatter
    assert scatter.above == 0.0
    assert found.mixed == (found.mixed[0],)  # 9 steps with prompts say too little by themselves
    assert np.mean(scatter.factors) * said.sum() == pytest.approx(took.sum(), rel=1e-3)


def test_without_scatter_steps_take_what_the_model_says():
    assert Draws(Noise(), random.Random(3)).factor(0.01, False) == 1.0

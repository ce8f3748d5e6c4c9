"""Tests that draw do so alike in every run, and otherwise in every further draw."""

import numpy as np
import pytest
import torch

from draws import numbers, repeat, seeded


def drawn(test, draws, name="name"):
    found = []
    repeat(lambda: found.append(test()), name, draws)
    return found


DRAWING = {
    "unnamed": lambda: torch.randn(3).tolist(),
    "seeded": lambda: torch.randn(3, generator=seeded(1)).tolist(),
    "NumPy's": lambda: numbers(1).normal(size=3).tolist(),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_draws_differ_from_each_other_and_not_from_run_to_run(kind):
    first = drawn(DRAWING[kind], 4)
    torch.randn(5)
    assert first == drawn(DRAWING[kind], 4)
    assert len(set(map(tuple, first))) == 4


def test_the_first_draw_is_of_the_seed_that_a_test_names():
    [one] = drawn(DRAWING["seeded"], 1)
    assert one == torch.randn(3, generator=torch.Generator().manual_seed(1)).tolist()
    [one] = drawn(DRAWING["NumPy's"], 1)
    assert one == np.random.default_rng(1).normal(size=3).tolist()
    assert drawn(DRAWING["unnamed"], 1) != drawn(DRAWING["unnamed"], 1, "another test")


def test_what_draws_nothing_runs_once_and_an_error_says_in_which_draw():
    assert drawn(lambda: 1, 100) == [1]
    found = []

    def fails_late():
        found.append(torch.rand(1))
        assert len(found) < 3

    with pytest.raises(AssertionError) as caught:
        repeat(fails_late, "name", 9)
    assert caught.value.__notes__ == ["in draw 2 of 9"]

"""Tests that cross many values may be cut to those cases that have every pair of them."""

from __future__ import annotations

import itertools

from pairs import covering


def crossed(**axes):
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairs_of(cases):
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_every_pair_of_values_is_left_in_few_cases():
    cases = crossed(dtype="abc", size=(1, 2, 3), norm=(None, 0.0, 1.0), bias=(False, True))
    chosen = [cases[at] for at in covering(cases)]
    assert pairs_of(chosen) == pairs_of(cases)
    assert 9 <= len(chosen) <= 12 < len(cases)


def test_every_value_is_left_in_as_many_cases_as_the_longest_dimension_has():
    cases = crossed(dtype="abc", size=(1, 2, 3, 4), bias=(False, True))
    chosen = [cases[at] for at in covering(cases, together=1)]
    assert len(chosen) == 4
    assert {value for case in chosen for value in case.items()} == {
        value for case in cases for value in case.items()
    }


def test_values_that_come_together_are_one_dimension():
    cases = [{"heads": h, "kv_heads": k, "page": p} for h, k in ((4, 2), (5, 1)) for p in (1, 16)]
    assert covering(cases) == [0, 1, 2, 3]


def test_one_dimension_or_none_is_not_cut():
    assert covering(crossed(size=(1, 2, 3))) == [0, 1, 2]
    assert covering([{}, {}]) == [0, 1]

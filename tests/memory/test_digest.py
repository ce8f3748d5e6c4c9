"""Digests tell decisions apart, and not only their bytes."""

from __future__ import annotations

import numpy as np

from pipeinfer.memory.digest import RunningDigest


def links(*plans: list[list[int]]) -> list[int]:
    digest, closed = RunningDigest(), []
    for plan in plans:
        for decision in plan:
            digest.add(np.array(decision, dtype=np.int32))
        closed.append(digest.close())
        assert digest.value == closed[-1]
    return closed


def test_the_same_numbers_in_other_decisions_are_another_digest():
    assert links([[1, 2]]) == links([[1, 2]])
    assert len({*links([[1, 2]]), *links([[1], [2]]), *links([[1, 2], []])}) == 3


def test_a_link_depends_on_those_before_it():
    assert links([[1]], [[2]])[1] != links([[3]], [[2]])[1]
    assert links([], [[2]])[1] != links([[2]])[0]

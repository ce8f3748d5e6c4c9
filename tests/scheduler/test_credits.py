"""Pages that plans may take: what is promised is there, in whatever order engines say so."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_core import pipeline

from pipeinfer.scheduler.credits import Allowance, Credits

POLICIES = ["mixed", "throughput", "prefill-first", "decode-first"]


@settings(max_examples=200, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    depth=st.integers(1, 3),
    pages=st.sampled_from([14, 20, 30]),
    budget=st.sampled_from([5, 16, 64]),
    chance=st.randoms(use_true_random=False),
)
def test_nothing_is_deferred_without_a_cache(policy, depth, pages, budget, chance):
    """Without hits the credits are exact, so the engine never has to say no."""
    overtakes = partial(chance.randint, 0)
    p = pipeline(policy, depth, pages, budget=budget, caching=False, overtakes=overtakes)
    for i in range(12):
        p.submit([i] * chance.randint(1, 30), 20)
        for _ in range(chance.randint(0, 4)):
            p.deliver()
    p.settle()
    assert p.engine.deferred == 0

"""The fast path decides what the server's whole cores decide, at the same virtual times."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_clusters import MODEL, arrivals, deployments, tallied

from pipeinfer.bench.span import Span
from simulate import workloads
from simulate.arrivals import Arrival
from simulate.deployment import Deployment
from simulate.folded import FoldedGroup
from simulate.noise import Noise, Scatter
from simulate.stepwise import StepwiseGroup

NOISY = msgspec.structs.replace(
    MODEL,
    bubble=(0.0, 0.0, 3e-4),
    outbound=(1e-4, 2e-4, 9e-3),
    outbound_row=3e-5,
    noise=Noise(
        scatter=(Scatter(0.0, (0.7, 0.9, 1.4)), Scatter(1.2e-3, (0.8, 1.1))),
        mixed=(Scatter(0.0, (0.95, 1.05)),),
        persistent=0.4,
        lasting=5.0,
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    deployments(),
    arrivals(),
    st.sampled_from(("prefix", "least-loaded", "round-robin")),
    st.integers(1, 3),
)
def test_fast_path_equals_the_whole_cores(deployment, arriving, policy, groups):
    where = policy, groups, NOISY
    fast = tallied(FoldedGroup, deployment, arriving, *where)
    whole = tallied(StepwiseGroup, deployment, arriving, *where)
    if deployment.overlap_depth < 3:
        assert fast.comparable() == whole.comparable()
    # Three steps deep and short of pages the cores may plan a step later, when pages are told.
    assert fast.groups == whole.groups


def test_fast_path_equals_the_whole_cores_while_memory_is_short():
    """Eight long answers in a pool for three: preempted again and again, some of them folded."""
    deployment = Deployment(kv_pages=60, page_size=4, max_model_len=200, max_running=8)
    arriving = [Arrival(n, 0.01 * n, np.full(10 + n, n, np.int32), 80) for n in range(8)]
    fast = tallied(FoldedGroup, deployment, arriving)
    whole = tallied(StepwiseGroup, deployment, arriving)
    assert whole.groups[0].preemptions > 0 and whole.groups[0].finished == 8
    assert fast.comparable() == whole.comparable()


def test_fast_path_equals_the_whole_cores_on_shared_prefixes_that_are_evicted():
    deployment = Deployment(kv_pages=56, max_model_len=1000, max_running=16, max_step_tokens=512)
    arriving = list(workloads.shared(40.0, 60, 6, 320, Span(5, 60), Span(20, 60), 1))
    for policy in ("prefix", "least-loaded", "round-robin"):
        fast = tallied(FoldedGroup, deployment, arriving, policy, 4)
        whole = tallied(StepwiseGroup, deployment, arriving, policy, 4)
        assert all(group.cached and group.evicted for group in whole.groups)
        assert fast.comparable() == whole.comparable()


def test_decodes_are_folded():
    """Else the fast path would be as slow as what it is compared with."""
    deployment = Deployment(max_running=32)
    tally = tallied(FoldedGroup, deployment, [])
    group = FoldedGroup(0, deployment, MODEL, tally)
    for number in range(20):
        group.submit(Arrival(number, 0.0, np.full(9, number, np.int32), 100), 0.0)
    group.run_until(0.06)
    assert len(group._cohort) == 20
    group.run_until(float("inf"))
    assert len(group._cohort) == 0 and len(group.ended) == 20


def test_a_policy_of_ones_own_sees_every_request():
    """It may look at whom it likes, so nobody is folded, and the result is the same."""
    own = "pipeinfer.scheduler.policies.mixed:Mixed"
    arriving = [Arrival(n, 0.002 * n, np.full(9, n, np.int32), 60) for n in range(12)]
    plain = tallied(FoldedGroup, Deployment(), arriving)
    assert tallied(FoldedGroup, Deployment(policy=own), arriving).comparable() == plain.comparable()
    group = FoldedGroup(0, Deployment(policy=own), MODEL, plain)
    group.submit(arriving[0], 0.0)
    group.run_until(0.05)
    assert group.next_at < float("inf") and len(group._cohort) == 0

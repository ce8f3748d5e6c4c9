"""Small clusters for the tests of tools/simulate: arrivals, deployments, and one run of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pipeinfer.step_cost import StepCost
from simulate.arrivals import Arrival
from simulate.deployment import Deployment
from simulate.run import simulate
from simulate.step_model import StepModel
from simulate.tally import Tally

COST = StepCost(((1, 100), (3, 130)), ((8, 190, 1), (16, 260, 1), (40, 330, 2)), 2)
MODEL = StepModel(
    fixed=1e-3, mixed=1e-4, decode=((0, 1e-5), (4, 3e-5)), prefill=((0, 2e-5),), context=1e-8,
    pair=1e-9, turnaround=(2e-4, 5e-4),
)  # fmt: skip
LONGEST = 200  # tokens of a request


@st.composite
def deployments(draw) -> Deployment:
    """Pools that hold everybody, and pools in which requests are deferred and preempted."""
    page_size = draw(st.sampled_from((1, 2, 4, 16)))
    return Deployment(
        kv_pages=draw(st.integers(40, 500)) // page_size + 4,
        page_size=page_size,
        max_model_len=LONGEST,
        max_running=draw(st.integers(1, 12)),
        max_step_tokens=draw(st.sampled_from((8, 32, 256))),
        mixed_step_tokens=draw(st.sampled_from((0, 8, 20))),
        policy=draw(st.sampled_from(("mixed", "throughput", "prefill-first", "decode-first"))),
        overlap_depth=draw(st.integers(1, 3)),
        cache=draw(st.sampled_from(("radix", "naive"))),
        step_cost=draw(st.sampled_from((None, COST))),
    )


@st.composite
def arrivals(draw) -> list[Arrival]:
    """Prompts that share beginnings, at moments that are far apart, close together or the same."""
    heads = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 3, (3, 40), np.int32)
    at, found = 0.0, []
    for number in range(draw(st.integers(1, 40))):
        at += draw(st.sampled_from((0.0, 0.0, 0.0007, 0.004, 0.06, 0.7)))
        head = heads[draw(st.integers(0, 2))][: draw(st.integers(0, 40))]
        tail = np.arange(draw(st.integers(1, 30)), dtype=np.int32) % 5 + number
        output = draw(st.sampled_from((1, 2, 3, 9, 30, 110)))
        found.append(Arrival(number, at, np.concatenate((head, tail)), output))
    return found


def tallied(
    kind, deployment: Deployment, arriving, policy="prefix", groups=1, model=MODEL
) -> Tally:
    return simulate(kind, deployment, model, iter(arriving), policy, groups)

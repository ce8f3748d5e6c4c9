"""Small clusters for the tests of tools/simulate: a model of step times, and one run."""

from __future__ import annotations

from simulate.cluster import Deployment
from simulate.metrics import Tally
from simulate.run import simulate
from simulate.step_model import StepModel

MODEL = StepModel(
    fixed=1e-3, mixed=1e-4, decode=((0, 1e-5), (4, 3e-5)), prefill=((0, 2e-5),), context=1e-8,
    pair=1e-9, turnaround=(2e-4, 5e-4),
)  # fmt: skip


def tallied(deployment: Deployment, arriving, policy="prefix", groups=1, model=MODEL) -> Tally:
    return simulate(deployment, model, iter(arriving), policy, groups)

"""`run`: the same arrivals through a cluster, once for each routing policy.

Knows what to simulate; how is in cluster.py and group.py.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeinfer.bench.dataset import TokenRange
from pipeinfer.scheduler.planner import DEFAULT_STEP_TOKENS
from pipeinfer.settings import ConfigurationError
from pipeinfer.tokenizer.routing import ROUTING_POLICIES, GroupRouter
from simulate import metrics, step_model, workloads
from simulate.cluster import Cluster, Deployment, Group
from simulate.metrics import GroupTally, Tally
from simulate.step_model import StepModel
from simulate.workloads import Arrival

SHARED = TokenRange(50, 150)  # tokens behind a shared prefix
WORKLOADS = ("poisson", "batch", "prefixes", "trace")
SETTINGS = [field for field in fields(Deployment) if field.name != "step_cost"]  # nobody types it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; a group's are named as the server's."""
    add = parser.add_argument
    add("--model", default="demo-cpu", metavar="FILE", help="step times: a shipped one or a file")
    add("--groups", type=int, default=4)
    add(
        "--routing",
        type=_policies,
        default=list(ROUTING_POLICIES),
        metavar="P,P",
        help="default: all",
    )
    add("--workload", choices=WORKLOADS, default="poisson")
    add("--requests", type=int, default=1000)
    add("--rate", type=float, default=10.0, help="arrivals a second, of all groups together")
    add("--prompt-tokens", type=TokenRange.parse, default=None, metavar="LOW:HIGH",
        help="default: 100:1024; behind a prefix 50:150")  # fmt: skip
    add("--output-tokens", type=TokenRange.parse, default=TokenRange(100, 1024), metavar="LOW:HIGH")
    add("--prefixes", type=int, default=64)
    add("--prefix-tokens", type=int, default=1500)
    add("--trace", type=Path, help="JSON lines: timestamp, input_length, output_length")
    add("--speed", type=float, default=1.0, help="of the trace")
    add(
        "--highest-id",
        type=int,
        default=workloads.HIGHEST_ID,
        help="of a batch's prompts, as tools/bench offline draws them for a model's vocabulary",
    )
    add("--work-seed", type=int, default=0)
    add("--noise-seed", type=int, default=0, help="of the scatter of steps and messages")
    add("--measured-steps", action="store_true",
        help="engines measure their steps first, as on a GPU, so that targets count")  # fmt: skip
    for field in SETTINGS:
        kind = type(field.default)
        add(f"--{field.name.replace('_', '-')}", type=kind, default=field.default,
            help=f"of a group; default {field.default}")  # fmt: skip


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in ROUTING_POLICIES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is unknown; there is {', '.join(ROUTING_POLICIES)}"
            )
    return names


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of each policy; prints them too. Raises ConfigurationError."""
    if options.groups < 1 or options.requests < 1 or options.rate <= 0:
        raise ConfigurationError("--groups and --requests must be at least 1, --rate above 0")
    model = step_model.load(options.model)
    values = {field.name: getattr(options, field.name) for field in SETTINGS}
    cost = None
    if options.measured_steps:
        cost = step_model.step_cost(model, options.max_step_tokens or DEFAULT_STEP_TOKENS)
    deployment = Deployment(**values, step_cost=cost)
    arrive = _workload(options)
    found: dict[str, Any] = {}
    for policy in options.routing:
        begin = time.process_time()
        tally = simulate(deployment, model, arrive(), policy, options.groups, options.noise_seed)
        found[policy] = metrics.of(tally, time.process_time() - begin)
        metrics.show(policy, found[policy])
    return {"groups": options.groups, "deployment": values, "policies": found}


def simulate(
    deployment: Deployment,
    model: StepModel,
    arrivals: Iterator[Arrival],
    policy: str,
    groups: int,
    noise_seed: int = 0,
) -> Tally:
    """One run: `groups` groups behind a router with `policy`."""
    tally = Tally([GroupTally() for _ in range(groups)], model.inbound)
    members = [Group(index, deployment, model, tally, noise_seed) for index in range(groups)]
    cluster = Cluster(members, GroupRouter(policy, groups))
    with _without_collections():
        cluster.run(arrivals)
    return tally


@contextmanager
def _without_collections() -> Iterator[None]:
    """Walking all requests and prefix trees again and again would find nothing: what ends is in no
    cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _workload(options: argparse.Namespace) -> Callable[[], Iterator[Arrival]]:
    """Makes the arrivals anew for each policy, always the same ones."""
    count, outputs, seed = options.requests, options.output_tokens, options.work_seed
    prompts = options.prompt_tokens or TokenRange(100, 1024)
    if options.workload == "trace":
        if options.trace is None:
            raise ConfigurationError("--workload trace needs --trace FILE")
        return lambda: workloads.recorded(options.trace, options.speed, seed)
    if options.workload == "batch":
        return lambda: workloads.batch(count, prompts, outputs, seed, options.highest_id)
    if options.workload == "poisson":
        return lambda: workloads.poisson(options.rate, count, prompts, outputs, seed)
    tails = options.prompt_tokens or SHARED
    heads = options.prefixes, options.prefix_tokens
    return lambda: workloads.shared(options.rate, count, *heads, tails, outputs, seed)

"""`targets`: how long a step beside streams may take, the more prompts wait, as a table.

Asks the server's own rule (pipeinfer/step_cost.py) about a step-time model. Simulates nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step_cost import PER_SECOND, PrefillBudget, Prompt, StepCost, Targets, prefill_budget
from simulate import step_model

MANY = (*range(1, 8), *range(8, 64, 4), 64, 80)  # prompts that wait
MS = PER_SECOND / 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; the targets are named as the server's."""
    add, usual = parser.add_argument, Settings()
    add("--model", default="qwen3-0.6b-h200", metavar="FILE",
        help="step times: a shipped one or a file")  # fmt: skip
    add("--itl-target", type=float, default=usual.itl_target, metavar="SECONDS")
    add("--ttft-target", type=float, default=usual.ttft_target, metavar="SECONDS")
    add("--max-step-tokens", type=int, default=8192)
    add("--streams", type=int, default=64, help="requests that decode")
    add("--stream-tokens", type=int, default=1000, help="in the context of each")
    add("--prompt-tokens", type=int, default=4000, help="of each prompt that waits")


def run(options: argparse.Namespace, _settings: Mapping[str, Any]) -> dict[str, Any]:
    """By number of prompts that came at once; prints it too. Raises ConfigurationError."""
    if min(options.streams, options.stream_tokens, options.prompt_tokens) < 1:
        raise ConfigurationError("streams and their tokens must be at least 1, and prompts' too")
    cost = step_model.step_cost(step_model.load(options.model), options.max_step_tokens)
    targets = Targets(options.itl_target, options.ttft_target)
    budget = prefill_budget(0, options.max_step_tokens, cost, targets)
    rows, context = options.streams, options.streams * options.stream_tokens
    found = [_chosen(budget, cost, rows, context, n, options.prompt_tokens) for n in MANY]
    tokens, rate = budget.within_itl_target(rows, context)
    print(f"beside {rows} streams, steps of up to {tokens:,} tokens, {rate:,.0f} a second")
    print(f"{'waiting':>12}  {'step':>12}  {'takes':>9}  {'prompt tokens/s':>15}")
    for one in found:
        print(
            f"{one['waiting']:>12,}  {one['tokens']:>12,}  {one['ms']:>6.1f} ms  "
            f"{one['rate']:>15,.0f}"
        )
    decodes = cost.decode_time(rows) + context * cost.kv_token
    result = {
        "steps": [
            {"tokens": size, "ms": time / MS}
            for size, time in cost.mixed_steps(rows, context, [Prompt(cost.mixed[-1][0])])
        ],
        "chosen": found,
        "decodes_ms": decodes / MS,
        "targets_ms": {"itl": targets.itl * 1e3, "ttft": targets.ttft * 1e3},
        "streams": rows,
    }
    return result


def _chosen(
    budget: PrefillBudget, cost: StepCost, rows: int, context: int, many: int, each: int
) -> dict[str, float]:
    """The step while `many` prompts of `each` tokens have just come."""
    waiting = [Prompt(each)] * many
    tokens = rows + budget.prompt_tokens(rows, context, waiting)
    times = list(cost.mixed_steps(rows, context, waiting))
    size, time = next((one for one in times if one[0] >= tokens), times[-1])
    prompts = min(size - rows, many * each)
    return {
        "waiting": many * each,
        "tokens": rows + prompts,
        "ms": time / MS,
        "rate": PER_SECOND * prompts / time,
    }

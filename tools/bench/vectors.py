"""`vectors`: prompts a second through `LLM.embed`, beside the same prompts through a model that
generates one token of each, in turns.

Knows the offline class; texts are token ids.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

from bench import shapes, workload
from pipeinfer import LLM, SamplingParams
from pipeinfer.bench.dataset import TokenRange

WAYS = {"generate": "generate", "embed": "embed"}  # and the `task` of each
WARM = 16  # prompts before the clock runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    shapes.add_config(parser)
    add("--prompts", type=int, default=10_000)
    add("--prompt-tokens", type=TokenRange.parse, default=TokenRange(20, 500), metavar="LOW:HIGH")
    add("--work-seed", type=int, default=0, help="seed of prompts and lengths")
    add(
        "--rounds", type=int, default=1, help="of both ways in turn, each with an engine of its own"
    )


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Prompts a second each way, and the ratio."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with shapes.settings_of(options.config, settings) as chosen:
        work = workload.uniform(
            options.prompts + WARM,
            options.prompt_tokens,
            TokenRange(1, 1),
            shapes.highest_id(chosen),
            options.work_seed,
        )
        for _ in range(options.rounds):
            for way, task in WAYS.items():
                with LLM(**{**chosen, "task": task}) as llm:
                    _compute(llm, way, work.prompts[:WARM])
                    seconds[way].append(_compute(llm, way, work.prompts[WARM:]))
                print(f"{way:10}{options.prompts / seconds[way][-1]:10.1f} prompts/s", flush=True)
    rates = {way: options.prompts / statistics.median(times) for way, times in seconds.items()}
    return {
        "prompts": options.prompts,
        "prompt_tokens": sum(map(len, work.prompts[WARM:])),
        **{f"{way}_prompts_per_s": rate for way, rate in rates.items()},
        "ratio": rates["embed"] / rates["generate"],
    }


def _compute(llm: LLM, way: str, prompts: list[list[int]]) -> float:
    """Seconds that all prompts take together."""
    given = [{"prompt_token_ids": ids} for ids in prompts]
    begin = time.perf_counter()
    if way == "embed":
        found = len(llm.embed(given, use_tqdm=False))
    else:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        found = len(llm.generate(given, params, use_tqdm=False))
    if found != len(prompts):
        raise RuntimeError(f"{found} results of {len(prompts)} prompts")
    return time.perf_counter() - begin

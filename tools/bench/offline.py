"""`offline`: tokens per second of one batch of requests through the offline class."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import adapters, batch, floor, shapes, workload
from pipeinfer import LLM, LoRARequest
from pipeinfer.bench.dataset import TokenRange
from pipeinfer.checkpoint.source import resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; MODEL is a setting."""
    add = parser.add_argument
    shapes.add_config(parser)
    text = "several with commas: batches of these sizes, one after the other, in the same engine"
    add("--requests", type=_counts, default=[256], metavar="N[,N...]", help=text)
    add("--prompt-tokens", type=TokenRange.parse, default=TokenRange(100, 1024), metavar="LOW:HIGH")
    add("--output-tokens", type=TokenRange.parse, default=TokenRange(100, 1024), metavar="LOW:HIGH")
    add("--temperature", type=float, default=0.6)
    add("--work-seed", type=int, default=0, help="seed of prompts and lengths")
    add("--rounds", type=int, default=1)
    text = "random low-rank adapters of a dense model, which requests have in turns"
    add("--adapters", type=int, default=0, help=text)
    add("--adapter-rank", type=int, default=16)
    add("--flops", type=float, default=0.0, help="of the machine, per second, for the efficiency")
    add("--bandwidth", type=float, default=0.0, help="of its memory, bytes per second")


def run(options: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics; prints them too."""
    with (
        shapes.settings_of(options.config, settings) as chosen,
        tempfile.TemporaryDirectory(prefix="pipeinfer-bench-") as folder,
    ):
        given: Sequence[LoRARequest] = ()
        if options.adapters:
            count, rank = options.adapters, options.adapter_rank
            model = resolve_model(chosen.get("model", ""))
            given = adapters.write_adapters(Path(folder), model, count, rank)
            chosen = {"enable_lora": True, "max_loras": count, "max_lora_rank": rank, **chosen}
        return _run(options, chosen, given)


def _run(
    options: argparse.Namespace, settings: dict[str, Any], given: Sequence[LoRARequest]
) -> dict[str, Any]:
    highest = shapes.highest_id(settings)
    spans = options.prompt_tokens, options.output_tokens
    works = [  # each with other prompts, so that none is in the prefix cache
        workload.uniform(count, *spans, highest, options.work_seed + number)
        for number, count in enumerate(options.requests)
    ]
    warm = workload.uniform(
        min(max(options.requests), 16), TokenRange(16, 64), TokenRange(4, 8), highest, -1
    )
    rounds: list[list[batch.Measured]] = [[] for _ in works]
    for _ in range(options.rounds):
        with LLM(**settings) as llm:
            batch.measure(llm, warm, options.temperature, given)
            for work, done in zip(works, rounds, strict=True):
                done.append(batch.measure(llm, work, options.temperature, given))
                rate = work.output_tokens / done[-1].seconds
                print(f"{len(work.prompts):6} requests{rate:10.1f} tokens/s", flush=True)
    found = [
        _metrics(options, settings, work, done) | {"adapters": len(given)}
        for work, done in zip(works, rounds, strict=True)
    ]
    return found[0] if len(found) == 1 else {str(one["requests"]): one for one in found}


def _metrics(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    work: workload.Work,
    rounds: list[batch.Measured],
) -> dict[str, Any]:
    """Those of one batch's rounds; prints them too."""
    metrics = batch.summary(work, rounds)
    if settings.get("device") == "cuda":
        metrics["outside_model_share"] = None  # a GPU engine counts launches there, not computing
    if options.flops and options.bandwidth:
        metrics |= floor.efficiency(options, settings, work, metrics["seconds"])
    batch.show(metrics)
    return metrics


def _counts(text: str) -> list[int]:
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 1:
        raise ValueError(text)
    return counts

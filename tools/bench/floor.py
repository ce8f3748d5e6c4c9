"""The physical floor of a run: the time that arithmetic and memory traffic alone would take.

Source: docs/benchmarks.md. Knows lengths and sizes; it measures nothing.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from bench.workload import Work
from pipeinfer.checkpoint.source import resolve_model

EIGHT_BITS = "F8_E4M3"
STORED_BYTES = {EIGHT_BITS: 1, "I32": 4, "U8": 1}  # of what is stored in a type of its own


@dataclass(frozen=True)
class ModelSize:
    """parameters: weights that a token is multiplied with, those of its experts included; narrow:
    those of them in FP8, whose products take half the time of others. dense_bytes: of the weights
    that every token is multiplied with; expert_bytes: of all experts, of which a token goes to the
    share `chosen`. kv_bytes: of K and V per token over all layers.
    """

    parameters: float
    dense_bytes: int
    kv_bytes: int
    expert_bytes: int = 0
    chosen: float = 0.0
    narrow: float = 0.0

    @property
    def operations(self) -> float:
        """For a token, in the time of those that are not in FP8."""
        return 2 * self.parameters - self.narrow

    def bytes_read(self, rows: int) -> float:
        """Of weights in a step of so many tokens, if each expert is as likely as another."""
        return self.dense_bytes + self.expert_bytes * (1 - (1 - self.chosen) ** rows)


@dataclass(frozen=True)
class Machine:
    """flops: multiply-adds count twice, per second; bandwidth: bytes per second."""

    flops: float
    bandwidth: float


def model_size(
    folder: Path, dtype: str, quantization: str = "auto", kv_cache_dtype: str = "auto"
) -> ModelSize:
    """Of the checkpoint in `folder`, computed in `dtype` (a name of torch), its weights as they are
    stored in other number formats, or rounded to; the last two as in the settings."""
    import torch

    from pipeinfer.attention.interface import bytes_per_page
    from pipeinfer.checkpoint.config import read_config
    from pipeinfer.checkpoint.quantization import choose_quantization as format_of
    from pipeinfer.kernels.formats import E4M3
    from pipeinfer.layers.quantized import QuantizingTarget
    from pipeinfer.models.loading import build_model

    number = getattr(torch, dtype)
    config = read_config(folder)
    config = replace(config, quantization=format_of(config.quantization, quantization))
    model = build_model(config, dtype=number, device="meta")
    # Of experts, and of all else.
    values, sizes, narrow = ({True: 0, False: 0} for _ in range(3))
    for source in model.sources():
        if source.name == "model.embed_tokens.weight" and not config.tie_word_embeddings:
            continue  # looked up, not multiplied with
        elements = prod(source.shape)
        each, of_expert = (source.stored_dtypes or (None,))[0], ".experts." in source.name
        if isinstance(source.target, QuantizingTarget):
            each = EIGHT_BITS
            sizes[of_expert] += source.shape[0] * 4  # a scale each
        sizes[of_expert] += elements * STORED_BYTES.get(each, number.itemsize)
        values[of_expert] += elements * _weights(source.name, each)
        narrow[of_expert] += elements if each == EIGHT_BITS else 0
    chosen = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    pages = E4M3 if kv_cache_dtype == "fp8_e4m3" else number
    kv = bytes_per_page(model.attention_shapes(), 1, pages)
    parameters, in_fp8 = (part[False] + part[True] * chosen for part in (values, narrow))
    return ModelSize(parameters, sizes[False], kv, sizes[True], chosen, in_fp8)


def _weights(name: str, stored: str | None) -> int:
    """That an element of tensor `name` stands for."""
    if name.endswith(("scale", "scale_inv", "scales", "qzeros", "zero_point")):
        return 0
    return {"I32": 8, "U8": 2}.get(stored or "", 1)


def batch_sizes(outputs: list[int], max_running: int) -> list[int]:
    """How many requests decode in each step, if a request takes the place of one that ends."""
    ends: list[int] = []
    changes: dict[int, int] = {}
    for tokens in outputs:
        start = heapq.heappop(ends) if len(ends) >= max_running else 0
        heapq.heappush(ends, start + tokens)
        changes[start] = changes.get(start, 0) + 1
        changes[start + tokens] = changes.get(start + tokens, 0) - 1
    sizes, running = [], 0
    for step in range(max(changes, default=0)):
        running += changes.get(step, 0)
        sizes.append(running)
    return sizes


def floor_seconds(work: Work, size: ModelSize, machine: Machine, max_running: int) -> float:
    """Prefill, the products of each decode step, and reading K and V for each output token."""
    each = size.operations / machine.flops
    prefill = each * work.prompt_tokens
    decode = sum(
        max(each * rows, size.bytes_read(rows) / machine.bandwidth)
        for rows in batch_sizes(work.outputs, max_running)
    )
    contexts = sum(
        tokens * len(prompt) + tokens * (tokens - 1) // 2
        for prompt, tokens in zip(work.prompts, work.outputs, strict=True)
    )
    return prefill + decode + contexts * size.kv_bytes / machine.bandwidth


def efficiency(
    options: argparse.Namespace, settings: Mapping[str, Any], work: Work, seconds: float
) -> dict[str, float]:
    """The share of `seconds` that the machine of --flops and --bandwidth needs at least."""
    from pipeinfer import settings as config
    from pipeinfer.engine.choices import choose_engine

    built = config.build(settings)
    folder = resolve_model(built.model, built.revision)
    dtype = str(choose_engine(built, folder).dtype).removeprefix("torch.")
    machine = Machine(options.flops, options.bandwidth)
    size = model_size(folder, dtype, built.quantization, built.kv_cache_dtype)
    least = floor_seconds(work, size, machine, built.max_running)
    return {"efficiency": least / seconds, "floor_seconds": least}

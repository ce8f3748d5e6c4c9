"""The physical floor of a run: the time that arithmetic and memory traffic alone would take.

Source: docs/benchmarks.md. Knows lengths and sizes; it measures nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path

from bench.workload import Work


@dataclass(frozen=True)
class ModelSize:
    """Bytes of the weights that every token is multiplied with, bytes of one number, bytes of K
    and V per token over all layers.
    """

    weight_bytes: int
    item_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Machine:
    """flops: multiply-adds count twice, per second; bandwidth: bytes per second."""

    flops: float
    bandwidth: float


def model_size(folder: Path, dtype: str) -> ModelSize:
    """Of the checkpoint in `folder`, computed in `dtype` (a name of torch)."""
    import torch

    from pipeinfer.checkpoint.config import read_config
    from pipeinfer.memory.pool import bytes_per_page
    from pipeinfer.models.build import build_model

    number = getattr(torch, dtype)
    model = build_model(read_config(folder), dtype=number, device="meta")
    weights = sum(source.target.numel() for source in model.sources())
    if not model.config.tie_word_embeddings:  # looked up, not multiplied with
        weights -= model.config.vocab_size * model.config.hidden_size
    kv = bytes_per_page(model.attention_shapes(), 1, number)
    return ModelSize(weights * number.itemsize, number.itemsize, kv)


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
    parameters = size.weight_bytes / size.item_bytes
    prefill = 2 * parameters * work.prompt_tokens / machine.flops
    weights_read = size.weight_bytes / machine.bandwidth
    decode = sum(
        max(2 * parameters * rows / machine.flops, weights_read)
        for rows in batch_sizes(work.outputs, max_running)
    )
    contexts = sum(
        tokens * len(prompt) + tokens * (tokens - 1) // 2
        for prompt, tokens in zip(work.prompts, work.outputs, strict=True)
    )
    return prefill + decode + contexts * size.kv_bytes / machine.bandwidth

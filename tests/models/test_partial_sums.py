"""A model whose sums over ranks are made by its norms computes what it computes otherwise."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CheckpointCache
from dense_attention import dense_causal
from pipeinfer.checkpoint.config import read_config
from pipeinfer.kernels.elementwise import all_reduce_norm_reference
from pipeinfer.layers.placement import Shard
from pipeinfer.models.loading import build_model, load_weights

RANKS, TOKENS = 2, 11
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("MistralForCausalLM", {}),
    ("Qwen2ForCausalLM", {}),
    ("Qwen3ForCausalLM", {}),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}),
]


class Threads:
    """What ranks that are threads hand to each other."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=60)

    def exchange(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        """[RANKS, ...] of all of them."""
        self.parts[rank] = part
        self.barrier.wait()
        found = torch.stack(self.parts)
        self.barrier.wait()
        return found


class Rank:
    """Collectives and a Fusion by the kernel's reference. In two shots nothing but garbage is left
    in the rows of a residual that are other ranks'; one shot takes `limit` rows at the most.
    """

    def __init__(self, threads: Threads, rank: int, limit: int, two_shots: bool) -> None:
        self.threads, self.rank, self.limit, self.two_shots = threads, rank, limit, two_shots
        self.summed = self.fused = 0

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        self.summed += 1
        return self.threads.exchange(self.rank, partial.clone()).sum(dim=0)

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.cat(tuple(self.threads.exchange(self.rank, partial)), dim=-1)

    def buffer(self, rows: int, size: int) -> torch.Tensor | None:
        return torch.full((rows, size), torch.nan) if rows <= self.limit else None

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.fused += 1
        parts = self.threads.exchange(self.rank, partial)
        norm, total = all_reduce_norm_reference(parts, residual, weight, eps)
        if not self.two_shots:
            return norm, total
        own = torch.arange(len(total)) % RANKS == self.rank
        total[~own] = torch.nan
        norms = self.threads.exchange(self.rank, norm)
        return norms[torch.arange(len(norm)) % RANKS, torch.arange(len(norm))], total


def check_ranks(folder: Path, ranks: list[Rank]) -> None:
    """Together they give the hidden states and the logits that one rank alone gives."""
    config = read_config(folder)
    tokens = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(3))

    def run(rank: Rank | None) -> tuple[torch.Tensor, torch.Tensor]:
        shard = Shard() if rank is None else Shard(rank.rank, RANKS)
        with torch.inference_mode():
            model = build_model(config, shard, collectives=rank, fusion=rank)
            load_weights(model, folder)
            hidden = model(tokens, torch.arange(TOKENS), dense_causal(model.attention_shapes()))
            return hidden, model.logits(hidden)

    alone = run(None)
    with ThreadPoolExecutor(RANKS) as pool:
        for together in pool.map(run, ranks):
            torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("two_shots", [False, True], ids=["one-shot", "two-shots"])
@pytest.mark.parametrize(("architecture", "overrides"), CASES)
def test_every_sum_of_a_pass_but_the_embeddings_is_made_by_the_norm_after_it(
    checkpoint: CheckpointCache, architecture: str, overrides: dict[str, Any], two_shots: bool
) -> None:
    folder = checkpoint(architecture, **overrides)
    threads = Threads()
    ranks = [Rank(threads, rank, TOKENS, two_shots) for rank in range(RANKS)]
    check_ranks(folder, ranks)
    layers = read_config(folder).num_layers
    assert [(rank.summed, rank.fused) for rank in ranks] == [(1, 2 * layers)] * RANKS


def test_a_model_that_norms_its_sums_before_it_adds_them_hands_on_no_partial_one(
    checkpoint: CheckpointCache,
) -> None:
    folder = checkpoint("Gemma3ForCausalLM", attention_bias=True)
    threads = Threads()
    ranks = [Rank(threads, rank, TOKENS, False) for rank in range(RANKS)]
    check_ranks(folder, ranks)
    sums = 1 + 2 * read_config(folder).num_layers
    assert [(rank.summed, rank.fused) for rank in ranks] == [(sums, 0)] * RANKS


def test_steps_with_more_rows_than_are_taken_are_added_up_by_the_group(
    checkpoint: CheckpointCache,
) -> None:
    folder = checkpoint("Qwen3ForCausalLM")
    config = read_config(folder)
    threads = Threads()
    ranks = [Rank(threads, rank, TOKENS - 1, True) for rank in range(RANKS)]

    def run(rank: Rank) -> None:
        with torch.inference_mode():
            model = build_model(config, Shard(rank.rank, RANKS), collectives=rank, fusion=rank)
            load_weights(model, folder)
            attend = dense_causal(model.attention_shapes())
            hidden = model(torch.arange(TOKENS), torch.arange(TOKENS), attend)
            assert torch.isfinite(hidden).all()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(run, ranks))
    assert [rank.fused for rank in ranks] == [0, 0]
    assert [rank.summed for rank in ranks] == [1 + 2 * config.num_layers] * RANKS

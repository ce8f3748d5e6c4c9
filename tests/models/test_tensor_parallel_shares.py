"""Ranks that each load their part compute together what one rank computes alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CheckpointCache
from dense_attention import dense_causal
from pipeinfer.checkpoint.config import ModelConfig, read_config
from pipeinfer.engine.choices import choose_engine
from pipeinfer.layers.placement import Shard
from pipeinfer.models.loading import build_model, fill_dummy, load_weights
from pipeinfer.settings import ConfigurationError, Settings
from quantized_checkpoints import quantize


class ThreadGroup:
    """Collectives among threads of this process; `rank` is set per thread by `view`."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def view(self, rank: int) -> RankView:
        return RankView(self, rank)


class RankView:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def exchange(self, partial: torch.Tensor) -> list[torch.Tensor]:
        self.group.parts[self.rank] = partial.clone()
        self.group.barrier.wait()
        parts = list(self.group.parts)
        self.group.barrier.wait()
        return parts

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange(partial)).sum(dim=0)

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.exchange(partial), dim=-1)


CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("LlamaForCausalLM", 2, {"attention_bias": True, "mlp_bias": True}),
    ("LlamaForCausalLM", 4, {"vocab_size": 259}),  # 2 KV heads on 4 ranks, uneven vocabulary
    ("MistralForCausalLM", 2, {"tie_word_embeddings": True, "vocab_size": 261}),
    ("Qwen2ForCausalLM", 4, {"num_key_value_heads": 1}),
    ("Qwen3ForCausalLM", 2, {}),
    ("Qwen3MoeForCausalLM", 2, {"mlp_only_layers": [0]}),
    ("Glm4ForCausalLM", 4, {"tie_word_embeddings": True}),
    ("GlmForCausalLM", 2, {}),
    ("GptOssForCausalLM", 4, {}),
    ("Glm4MoeForCausalLM", 4, {"merged": True}),
    ("MixtralForCausalLM", 2, {"merged": True}),
    ("Qwen2MoeForCausalLM", 4, {"mlp_only_layers": [1]}),
    ("Gemma3ForCausalLM", 2, {"tie_word_embeddings": True, "vocab_size": 261}),
    ("Gemma3ForCausalLM", 4, {"num_key_value_heads": 1, "attention_bias": True}),
]
# Ranks with different numbers of experts, of a size that does not divide by them.
EXPERTS: list[tuple[str, int, dict[str, Any]]] = [
    ("Qwen3MoeForCausalLM", 2, {"num_experts": 7}),
    ("Qwen3MoeForCausalLM", 4, {"num_experts": 7, "moe_intermediate_size": 31}),
    ("MixtralForCausalLM", 2, {"num_local_experts": 7, "merged": True}),
    ("Qwen2MoeForCausalLM", 2, {"num_experts": 7}),
    ("GptOssForCausalLM", 2, {"num_local_experts": 7}),
    ("Glm4MoeForCausalLM", 4, {"n_routed_experts": 6, "n_group": 3}),
]


@pytest.mark.parametrize(("architecture", "ranks", "overrides"), CASES)
def test_ranks_together_equal_one_rank(
    checkpoint: CheckpointCache, architecture: str, ranks: int, overrides: dict[str, Any]
) -> None:
    assert_equals_one_rank(checkpoint(architecture, **overrides), ranks)


@pytest.mark.parametrize(("architecture", "ranks", "overrides"), EXPERTS)
def test_ranks_with_whole_experts_equal_one_rank(
    checkpoint: CheckpointCache, architecture: str, ranks: int, overrides: dict[str, Any]
) -> None:
    folder = checkpoint(architecture, **overrides)
    assert_equals_one_rank(folder, ranks, expert_parallel=True)


@pytest.mark.parametrize("form", ["fp8 rows", "fp8 tensor", "fp8 blocks", "awq", "gptq", "4 bits"])
def test_ranks_share_matrices_in_other_number_formats(
    checkpoint: CheckpointCache, tmp_path: Path, form: str
) -> None:
    source = checkpoint("Qwen2MoeForCausalLM", intermediate_size=128, mlp_only_layers=[1],
                        moe_intermediate_size=64, shared_expert_intermediate_size=64)  # fmt: skip
    folder, _ = quantize(source, tmp_path, form)
    assert_equals_one_rank(folder, 2)
    assert_equals_one_rank(folder, 2, expert_parallel=True)


@pytest.mark.parametrize(("size", "whole"), [(64, False), (32, True)])
def test_ranks_share_experts_in_mxfp4(
    checkpoint: CheckpointCache, tmp_path: Path, size: int, whole: bool
) -> None:
    folder, _ = quantize(checkpoint("GptOssForCausalLM", intermediate_size=size), tmp_path, "mxfp4")
    assert_equals_one_rank(folder, 2, expert_parallel=whole)


@pytest.mark.parametrize(
    ("architecture", "form", "named"),
    [
        ("LlamaForCausalLM", "awq", "64 x 48 weights do not divide into groups of 32"),
        ("LlamaForCausalLM", "fp8 blocks", "down_proj: 0 to 48 of 96 are not whole blocks of 32"),
        ("GptOssForCausalLM", "mxfp4", "a rank's 16 columns are not whole blocks of 32"),
    ],
)
def test_a_cut_through_values_with_one_scale_is_refused_before_weights_are_read(
    checkpoint: CheckpointCache, tmp_path: Path, architecture: str, form: str, named: str
) -> None:
    folder, _ = quantize(checkpoint(architecture), tmp_path, form)
    with pytest.raises(ConfigurationError, match=named):
        choose_engine(Settings(tp=2), folder)


def assert_equals_one_rank(folder: Path, ranks: int, expert_parallel: bool = False) -> None:
    """Every rank's logits of some tokens are those of one rank alone."""
    config = read_config(folder)
    tokens = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(3))
    group = ThreadGroup(ranks)

    def run(rank: int, size: int) -> torch.Tensor:
        view = group.view(rank) if size > 1 else None
        with torch.inference_mode():
            model = build_model(config, Shard(rank, size, expert_parallel), collectives=view)
            load_weights(model, folder)
            hidden = model(tokens, torch.arange(12), dense_causal(model.attention_shapes()))
            return model.logits(hidden)

    alone = run(0, 1)
    with ThreadPoolExecutor(ranks) as pool:
        together = list(pool.map(run, range(ranks), [ranks] * ranks))
    for logits in together:
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_parts_of_all_ranks_cover_every_tensor_once(checkpoint: CheckpointCache) -> None:
    config = read_config(checkpoint("LlamaForCausalLM", vocab_size=259))
    covered: dict[str, torch.Tensor] = {}
    for rank in range(4):
        for source in build_model(config, Shard(rank, 4), device="meta").sources():
            count = covered.setdefault(source.name, torch.zeros(source.shape))
            count[source.slices] += 1
    for name, count in covered.items():
        replicated = 4 if "norm" in name else 2 if "k_proj" in name or "v_proj" in name else 1
        assert torch.all(count == replicated), name


def test_a_rank_reads_only_the_experts_that_it_has(checkpoint: CheckpointCache) -> None:
    config = read_config(checkpoint("Qwen3MoeForCausalLM", num_experts=7))
    read: list[set[int]] = []
    for rank in range(4):
        model = build_model(config, Shard(rank, 4, expert_parallel=True), device="meta")
        names = [s.name for s in model.sources() if ".experts." in s.name]
        assert len(names) == len(set(names))
        read.append({int(name.split(".experts.")[1].split(".")[0]) for name in names})
    assert sorted(expert for experts in read for expert in experts) == list(range(7))
    assert {len(experts) for experts in read} == {1, 2}


@pytest.mark.parametrize(
    ("architecture", "named"),
    [("Qwen3MoeForCausalLM", "num_experts 2 is less than 4"), ("Qwen3ForCausalLM", "no mixture")],
)
def test_experts_that_cannot_be_dealt_out_are_refused(
    checkpoint: CheckpointCache, architecture: str, named: str
) -> None:
    few = {"num_experts": 2} if "Moe" in architecture else {}
    config = read_config(checkpoint(architecture, **few))
    with pytest.raises(ConfigurationError, match=f"--enable-expert-parallel: .*{named}"):
        build_model(config, Shard(0, 4, expert_parallel=True), device="meta")


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_dummy_ranks_hold_parts_of_one_model(
    checkpoint: CheckpointCache, architecture: str
) -> None:
    config = read_config(checkpoint(architecture))
    full = dummy_tensors(config, Shard(), seed=5)
    other = dummy_tensors(config, Shard(), seed=6)
    for rank in range(2):
        for name, (part, tensor) in dummy_tensors(config, Shard(rank, 2), seed=5).items():
            whole = full[name][1]
            if "norm" in name:
                assert torch.all(tensor == 1)
                continue
            assert torch.equal(tensor, whole[part]), name
            assert not torch.equal(whole, other[name][1])
            assert 0.015 < float(whole.std()) < 0.025


def dummy_tensors(
    config: ModelConfig, shard: Shard, seed: int
) -> dict[str, tuple[tuple[slice, ...], torch.Tensor]]:
    """Every parameter after filling, with the part of the checkpoint's tensor that it is."""
    model = build_model(config, shard)
    sources = list(model.sources())
    fill_dummy(model, seed)
    return {source.name: (source.slices, source.target) for source in sources}


def test_part_without_a_group_refuses_to_run(checkpoint: CheckpointCache) -> None:
    config = read_config(checkpoint("LlamaForCausalLM"))
    model = build_model(config, Shard(1, 2))
    fill_dummy(model)
    attend = dense_causal(model.attention_shapes())
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        model(torch.tensor([1]), torch.tensor([0]), attend)


@pytest.mark.parametrize(
    ("overrides", "ranks", "named"),
    [
        ({}, 3, "num_attention_heads 4"),
        ({"intermediate_size": 98}, 4, "intermediate_size 98"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 192},
            4,
            "num_key_value_heads 6",
        ),
    ],
)
def test_uneven_split_is_refused_by_name(
    checkpoint: CheckpointCache, overrides: dict[str, Any], ranks: int, named: str
) -> None:
    config = read_config(checkpoint("LlamaForCausalLM", **overrides))
    with pytest.raises(ConfigurationError, match=named):
        build_model(config, Shard(0, ranks), device="meta")

"""Every architecture, RoPE type and special case gives the logits that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import ALL_ARCHITECTURES, CheckpointCache, load_reference
from dense_attention import causal, decoding, dense_causal, split
from pipeinfer.checkpoint.config import read_config
from pipeinfer.models.causal_lm import CausalLM
from pipeinfer.models.loading import build_model, check_checkpoint, load_weights

LENGTH = 48
TOLERANCE = 1e-4


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    config = read_config(folder)
    check_checkpoint(folder, config)
    model = build_model(config, dtype=dtype)
    load_weights(model, folder)
    return model


def prompt(length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def difference(folder: Path, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> float:
    """max |ours - theirs| / max |theirs| over the logits of all positions of one sequence."""
    model = loaded(folder, dtype)
    tokens = prompt(length)
    hidden = model(tokens, torch.arange(length), dense_causal(model.attention_shapes()))
    ours = model.logits(hidden).float()
    theirs = load_reference(folder, dtype)(tokens[None]).logits[0].float()
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_architecture(checkpoint: CheckpointCache, architecture: str, tied: bool) -> None:
    assert difference(checkpoint(architecture, tie_word_embeddings=tied)) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_multi_query_and_multi_head(
    checkpoint: CheckpointCache, architecture: str, kv_heads: int
) -> None:
    assert difference(checkpoint(architecture, num_key_value_heads=kv_heads)) < TOLERANCE


ROPES: dict[str, dict[str, Any]] = {
    "large theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.7},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with its own numbers": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.4,
    },
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rope_type(checkpoint: CheckpointCache, rope: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10_000.0} | rope
    assert difference(checkpoint("LlamaForCausalLM", rope_parameters=parameters)) < TOLERANCE


@torch.inference_mode()
def test_dynamic_rope_past_its_context_decodes_as_transformers_does(
    checkpoint: CheckpointCache,
) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    folder = checkpoint("LlamaForCausalLM", rope_parameters=parameters, max_position_embeddings=16)
    model, reference = loaded(folder), load_reference(folder)
    attend = decoding(model.attention_shapes())
    past = None
    tokens = prompt(40)
    for position, token in enumerate(tokens):
        ours = model.logits(model(token[None], torch.tensor([position]), attend))[0]
        output = reference(token[None, None], past_key_values=past, use_cache=True)
        past, theirs = output.past_key_values, output.logits[0, -1]
        assert (ours - theirs).abs().max() / theirs.abs().max() < TOLERANCE, position


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral window": ("MistralForCausalLM", {"sliding_window": 8}),
    "mistral without window": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2 window from layer 1": (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3 windows by layer type": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3 moe window": (
        "Qwen3MoeForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8},
    ),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "moe biases": ("Qwen3MoeForCausalLM", {"attention_bias": True}),
    "moe weights not normalized": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
    "moe every second layer": (
        "Qwen3MoeForCausalLM",
        {"decoder_sparse_step": 2, "num_hidden_layers": 3},
    ),
    "moe with a dense layer": ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}),
    "moe with one expert each": ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 1}),
    "head size of its own": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "odd vocabulary": ("LlamaForCausalLM", {"vocab_size": 259}),
    "gemma with linear scaling": (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma by layer type": (
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma without full layers": ("Gemma3ForCausalLM", {"num_hidden_layers": 2}),
    "gemma biases": ("Gemma3ForCausalLM", {"attention_bias": True, "num_key_value_heads": 1}),
    "gemma with large heads": ("Gemma3ForCausalLM", {"head_dim": 256, "num_hidden_layers": 6}),
    "several files": ("Qwen3ForCausalLM", {"max_shard_size": "40KB"}),
    "mixtral window": ("MixtralForCausalLM", {"sliding_window": 8}),
    "mixtral, experts merged": ("MixtralForCausalLM", {"merged": True}),
    "qwen3 moe, experts merged": ("Qwen3MoeForCausalLM", {"merged": True}),
    "qwen2 moe, dense layers between": (
        "Qwen2MoeForCausalLM",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 4},
    ),
    "qwen2 moe, windows, no biases, weights normalized": (
        "Qwen2MoeForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "num_hidden_layers": 4,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "glm 4 without biases": ("Glm4ForCausalLM", {"attention_bias": False}),
    "glm 4 that rotates whole heads": (
        "Glm4ForCausalLM",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "glm 4 that rotates three quarters": (
        "Glm4ForCausalLM",
        {"rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.75}},
    ),
    "glm 4 with yarn": (
        "Glm4ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "glm 4 moe, all layers sparse, one group, experts merged": (
        "Glm4MoeForCausalLM",
        {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "merged": True},
    ),
    "glm 4 moe, no norm and no biases, weights not normalized, two shared experts": (
        "Glm4MoeForCausalLM",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    ),
    "gpt-oss without windows, one KV head": (
        "GptOssForCausalLM",
        {"layer_types": ["full_attention"] * 2, "num_key_value_heads": 1},
    ),
    "gpt-oss without bounds that matter, no biases of attention": (
        "GptOssForCausalLM",
        {"swiglu_limit": 50.0, "swiglu_alpha": 1.0, "attention_bias": False},
    ),
    "moe in several files": ("Qwen3MoeForCausalLM", {"max_shard_size": "100KB"}),
}


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS.values(), ids=VARIANTS)
def test_variant(checkpoint: CheckpointCache, architecture: str, overrides: dict[str, Any]) -> None:
    folder = checkpoint(architecture, **overrides)
    assert ("max_shard_size" in overrides) == (folder / "model.safetensors.index.json").exists()
    assert difference(folder) < TOLERANCE


@torch.inference_mode()
def test_gemma_3_behind_its_window_is_as_near_in_absolute_terms(
    checkpoint: CheckpointCache,
) -> None:
    folder = checkpoint("Gemma3ForCausalLM", initializer_range=0.05)
    model, tokens = loaded(folder), prompt(120)
    ours = model.logits(model(tokens, torch.arange(120), dense_causal(model.attention_shapes())))
    theirs = load_reference(folder)(tokens[None]).logits[0]
    assert float((ours - theirs).abs().max()) < 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@torch.inference_mode()
def test_gemma_3_rounds_its_embeddings_and_norms_in_bfloat16_as_transformers_does(
    checkpoint: CheckpointCache,
) -> None:
    """Bit by bit: one plus a weight is taken in float32, the scale of embeddings in bfloat16."""
    folder = checkpoint("Gemma3ForCausalLM", dtype=torch.bfloat16)
    model, theirs = loaded(folder, torch.bfloat16), load_reference(folder, torch.bfloat16).model
    tokens = prompt(200)
    embedded = model.embedding(tokens)
    assert torch.equal(embedded, theirs.embed_tokens(tokens))
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    found, expected = model.norm(x), theirs.norm(x)
    assert float((found == expected).float().mean()) > 0.999  # a sum in another order
    heads = x.view(200, 4, 16)
    attention = theirs.layers[5].self_attn
    expected = torch.cat([attention.q_norm(heads), attention.k_norm(heads[:, :2])], dim=1)
    norm = model.layers[5].attention.norm
    assert norm is not None
    found = norm(torch.cat([heads, heads[:, :2]], dim=1))
    assert float((found == expected).float().mean()) > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "architecture",
    ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "Qwen2MoeForCausalLM"],
)
def test_half_precision(checkpoint: CheckpointCache, architecture: str, dtype: torch.dtype) -> None:
    """Both round differently, so this is as near as the reference is to its own float32 self."""
    folder = checkpoint(architecture, dtype=dtype, initializer_range=0.1)
    model = build_model(read_config(folder), dtype=dtype)
    assert {source.target.dtype for source in model.sources()} == {dtype}
    assert difference(folder, dtype) < (0.08 if dtype == torch.bfloat16 else 0.01)


def test_half_precision_checkpoint_in_float32_loses_nothing(checkpoint: CheckpointCache) -> None:
    folder = checkpoint("Qwen3ForCausalLM", dtype=torch.bfloat16)
    assert read_config(folder).dtype == "bfloat16"
    assert difference(folder, torch.float32) < TOLERANCE


@torch.inference_mode()
def test_logits_of_a_token_do_not_depend_on_its_neighbours_in_the_batch(
    checkpoint: CheckpointCache,
) -> None:
    """Two sequences in one call, as a step of two rows, give what each gives alone."""
    model = loaded(checkpoint("Qwen3MoeForCausalLM"))
    shapes = model.attention_shapes()
    first, second = prompt(9), prompt(5, seed=2)

    def attend(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        rows = zip(*(x.split([9, 5]) for x in qkv), strict=True)
        return torch.cat([causal(shapes)(layer, *row) for row in rows])

    positions = torch.cat([torch.arange(9), torch.arange(5)])
    together = model(torch.cat([first, second]), positions, split(attend))
    alone = [model(x, torch.arange(len(x)), dense_causal(shapes)) for x in (first, second)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@torch.inference_mode()
def test_everything_but_attention_is_bitwise_equal_in_any_batch(
    checkpoint: CheckpointCache, architecture: str
) -> None:
    """What lets a prompt be chunked anywhere on the CPU without a greedy token flipping."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("holds for packed matrices only")
    model = loaded(checkpoint(architecture))
    tokens, positions = prompt(150), torch.arange(150)

    attend = split(lambda layer, q, k, v: q * 0.5)
    whole = model(tokens, positions, attend)
    logits = model.logits(whole)
    for first, last in [(0, 1), (149, 150), (3, 5), (10, 27), (0, 64), (20, 149)]:
        part = model(tokens[first:last], positions[first:last], attend)
        assert torch.equal(part, whole[first:last]), (first, last)
        assert torch.equal(model.logits(part), logits[first:last]), (first, last)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
@torch.inference_mode()
def test_rows_that_are_asked_for_are_those_of_the_whole(
    checkpoint: CheckpointCache, architecture: str
) -> None:
    """The last layer computes no others, and keys and values of all."""
    model = loaded(checkpoint(architecture))
    tokens, positions, rows = prompt(90), torch.arange(90), torch.tensor([2, 40, 41, 89])
    shapes, stored = model.attention_shapes(), []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        stored.append((len(q), len(k), len(v)))
        return causal(shapes)(layer, q, k, v)

    whole = model(tokens, positions, dense_causal(shapes))
    some = model(tokens, positions, split(attend), rows)
    torch.testing.assert_close(some, whole[rows])
    assert stored == [(90, 90, 90)] * len(model.layers)

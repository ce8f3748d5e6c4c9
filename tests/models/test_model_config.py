"""config.json of both generations is read alike, and every unsupported one is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from checkpoints import ALL_ARCHITECTURES, CheckpointCache
from pipeinfer.checkpoint.config import GenerationDefaults, read_config, read_generation
from pipeinfer.settings import ConfigurationError

Change = Callable[[dict[str, Any]], None]


def rewritten(source: Path, folder: Path, change: Change) -> Path:
    """A folder with `source`'s config.json after `change`."""
    raw = json.loads((source / "config.json").read_text())
    change(raw)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def setting(**fields: Any) -> Change:
    return lambda raw: raw.update(fields)


def lacking(name: str) -> Change:
    return lambda raw: raw.pop(name)


# What a config.json may leave out, where transformers' configuration of the family has it.
LEFT_OUT = {
    "max_position_embeddings": "max_position_embeddings",
    "num_key_value_heads": "num_kv_heads",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}


def to_old_generation(raw: dict[str, Any]) -> None:
    """What transformers 4 would have written."""
    rope = raw.pop("rope_parameters")
    if "full_attention" in rope:
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        raw["sliding_window_pattern"] = raw.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    raw["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    raw["torch_dtype"] = raw.pop("dtype")
    raw.pop("layer_types", None)
    if raw["model_type"] == "qwen3_moe":
        raw["num_experts"] = raw.pop("num_local_experts")


TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
OLD_AND_NEW: list[tuple[str, dict[str, Any]]] = [
    *((architecture, {}) for architecture in ALL_ARCHITECTURES),
    ("Gemma3ForCausalLM", {"rope_parameters": TWO_ROPES, "sliding_window_pattern": 3}),
    (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    (
        "Qwen2MoeForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    (
        "Glm4ForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}},
    ),
    (
        "Qwen2ForCausalLM",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    ),
]


@pytest.mark.parametrize(("architecture", "overrides"), OLD_AND_NEW)
def test_both_generations_read_alike(
    checkpoint: CheckpointCache, tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    folder = checkpoint(architecture, **overrides)
    assert "rope_theta" not in json.loads((folder / "config.json").read_text())
    old = rewritten(folder, tmp_path / "old", to_old_generation)
    assert "rope_theta" in json.loads((old / "config.json").read_text())
    assert read_config(old) == read_config(folder)


def test_fields_of_gemma_3_arrive(checkpoint: CheckpointCache) -> None:
    config = read_config(checkpoint("Gemma3ForCausalLM", rope_parameters=TWO_ROPES))
    assert config.sliding_windows == (24, 24, 24, 24, 24, None, 24)
    assert [rope.theta for rope in config.ropes] == [3e4] * 5 + [5e5] + [3e4]
    assert (config.rope.type, config.rope.factor) == ("linear", 8.0)
    assert config.window_rope is not None and config.window_rope.type == "default"
    assert config.context_length == 512  # the scaling is in it already
    assert config.attention_scale == 24**-0.5
    assert config.activation == "gelu_tanh"


def test_what_a_file_of_gemma_3_leaves_out_is_what_transformers_takes(
    checkpoint: CheckpointCache, tmp_path: Path
) -> None:
    def change(raw: dict[str, Any]) -> None:
        for name in (
            "rope_parameters", "layer_types", "sliding_window", "head_dim", "tie_word_embeddings",
            "hidden_activation", "query_pre_attn_scalar", "use_bidirectional_attention",
        ):  # fmt: skip
            raw.pop(name)

    config = read_config(rewritten(checkpoint("Gemma3ForCausalLM"), tmp_path / "x", change))
    assert config.sliding_windows == (4096,) * 5 + (None, 4096)
    assert [rope.theta for rope in config.ropes] == [1e4] * 5 + [1e6, 1e4]
    assert (config.head_dim, config.attention_scale) == (256, 256**-0.5)
    assert config.tie_word_embeddings


def test_what_a_file_of_gpt_oss_leaves_out_is_what_transformers_takes(
    checkpoint: CheckpointCache, tmp_path: Path
) -> None:
    def change(raw: dict[str, Any]) -> None:
        for name in ("rope_parameters", "layer_types", "sliding_window", "head_dim"):
            raw.pop(name)

    config = read_config(rewritten(checkpoint("GptOssForCausalLM"), tmp_path / "x", change))
    assert config.sliding_windows == (128, None)
    assert (config.rope.type, config.rope.theta, config.rope.factor) == ("yarn", 150_000.0, 32.0)
    assert not config.rope.truncate
    assert (config.head_dim, config.context_length) == (64, 131_072)


def test_fields_of_a_real_file_arrive(checkpoint: CheckpointCache) -> None:
    config = read_config(checkpoint("Qwen3MoeForCausalLM", num_hidden_layers=3))
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.head_dim, config.hidden_size, config.vocab_size) == (16, 64, 264)
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert config.sparse_layers == (True, True, True)
    assert config.eos_ids == (258,)
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
    ],
)
def test_context_length_counts_rope_scaling(
    checkpoint: CheckpointCache, tmp_path: Path, rope: dict[str, Any], context: int
) -> None:
    source = checkpoint("LlamaForCausalLM")
    folder = rewritten(source, tmp_path / "x", setting(rope_parameters=rope))
    assert read_config(folder).context_length == context


REFUSED: dict[str, tuple[str, Change, str]] = {
    "architecture": (
        "LlamaForCausalLM",
        setting(architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel; supported: Gemma3ForCausalLM, Glm4",
    ),
    "no architecture": ("LlamaForCausalLM", lacking("architectures"), "none named"),
    "rope type": (
        "LlamaForCausalLM",
        setting(rope_parameters={"rope_type": "longrope"}),
        "unknown RoPE type 'longrope'; supported: default, linear",
    ),
    "old rope type": (
        "LlamaForCausalLM",
        setting(rope_scaling={"type": "su", "factor": 2.0}),
        "unknown RoPE type 'su'",
    ),
    "rope by layer": (
        "Qwen3ForCausalLM",
        setting(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "differ between layers",
    ),
    "rope factor": (
        "LlamaForCausalLM",
        setting(rope_parameters={"rope_type": "linear"}),
        "factor is missing",
    ),
    "rotation of more than a head": (
        "Glm4ForCausalLM",
        setting(rope_parameters={"partial_rotary_factor": 1.5}),
        "partial_rotary_factor 1.5 is above 1",
    ),
    "rotation of nothing": (
        "GlmForCausalLM",
        setting(rope_parameters={"partial_rotary_factor": 0.05}),
        "partial_rotary_factor 0.05 rotates 0 values",
    ),
    "partial rotation": (
        "LlamaForCausalLM",
        setting(partial_rotary_factor=0.5),
        "partial_rotary_factor 0.5",
    ),
    "activation": ("LlamaForCausalLM", setting(hidden_act="gelu"), "hidden_act 'gelu'"),
    "dtype": ("LlamaForCausalLM", setting(dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn'"),
    "quantized": (
        "LlamaForCausalLM",
        setting(quantization_config={"quant_method": "bitsandbytes"}),
        "quant_method 'bitsandbytes' is not supported, only awq, compressed-tensors, fp8, gptq",
    ),
    "quantized, somehow": (
        "LlamaForCausalLM",
        setting(quantization_config=[4]),
        "quantization_config is not an object",
    ),
    "missing size": ("LlamaForCausalLM", lacking("hidden_size"), "hidden_size is missing"),
    "size as text": (
        "LlamaForCausalLM",
        setting(vocab_size="264"),
        "vocab_size must be a whole number >= 1, not '264'",
    ),
    "zero layers": ("LlamaForCausalLM", setting(num_hidden_layers=0), "num_hidden_layers"),
    "heads": (
        "LlamaForCausalLM",
        setting(num_key_value_heads=3),
        "not a multiple of num_key_value_heads 3",
    ),
    "odd head": ("LlamaForCausalLM", setting(head_dim=15), "head_dim 15 is odd"),
    "layer type": (
        "Qwen3ForCausalLM",
        setting(use_sliding_window=True, layer_types=["full_attention", "linear_attention"]),
        "layer type 'linear_attention'",
    ),
    "layer types": (
        "Qwen3ForCausalLM",
        setting(use_sliding_window=True, layer_types=["full_attention"]),
        "layer_types has 1 entries for 2 layers",
    ),
    "experts of a few groups": (
        "Glm4MoeForCausalLM",
        setting(num_experts_per_tok=5),
        "num_experts_per_tok 5 is above num_experts 4",
    ),
    "groups of experts": (
        "Glm4MoeForCausalLM",
        setting(n_group=3),
        "n_group 3 does not fit n_routed_experts 8",
    ),
    "best groups of experts": (
        "Glm4MoeForCausalLM",
        setting(topk_group=5),
        "topk_group 5 is above n_group 4",
    ),
    "experts": (
        "Qwen3MoeForCausalLM",
        setting(num_experts_per_tok=9),
        "num_experts_per_tok 9 is above num_experts 8",
    ),
    "softcap of logits": (
        "Gemma3ForCausalLM",
        setting(final_logit_softcapping=30.0),
        "final_logit_softcapping 30.0",
    ),
    "softcap of scores": (
        "Gemma3ForCausalLM",
        setting(attn_logit_softcapping=50.0),
        "attn_logit_softcapping 50.0",
    ),
    "bidirectional": (
        "Gemma3ForCausalLM",
        setting(use_bidirectional_attention=True),
        "use_bidirectional_attention is not",
    ),
    "gelu without tanh": (
        "Gemma3ForCausalLM",
        setting(hidden_activation="gelu"),
        "hidden_activation 'gelu' is not supported, only 'gelu_pytorch_tanh'",
    ),
    "no window": ("Gemma3ForCausalLM", setting(sliding_window=None), "sliding_window is null"),
    "one rope for two": (
        "Gemma3ForCausalLM",
        setting(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "rope_parameters must have an object for each layer type",
    ),
    "yarn by layer": (
        "Gemma3ForCausalLM",
        setting(rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 2.0}}),
        "RoPE type 'yarn' by layer type",
    ),
    "no factor by layer": (
        "Gemma3ForCausalLM",
        setting(rope_scaling={"rope_type": "linear"}),
        "factor is missing",
    ),
    "eos": ("LlamaForCausalLM", setting(eos_token_id="</s>"), "eos_token_id"),
    "flag": ("LlamaForCausalLM", setting(tie_word_embeddings="yes"), "tie_word_embeddings"),
}


@pytest.mark.parametrize(("architecture", "change", "named"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_refused_in_one_line(
    checkpoint: CheckpointCache, tmp_path: Path, architecture: str, change: Change, named: str
) -> None:
    folder = rewritten(checkpoint(architecture), tmp_path / "x", change)
    with pytest.raises(ConfigurationError) as caught:
        read_config(folder)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"), [(None, "has no config.json"), ("{", "cannot be read"), ("[]", "not a JSON")]
)
def test_unreadable_configuration_is_refused(tmp_path: Path, text: str | None, named: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, GenerationDefaults(eos_ids=(258,))),
        ({"eos_token_id": 256}, GenerationDefaults(eos_ids=(258, 256))),
        (
            {"eos_token_id": [258, 257], "temperature": 0.0, "top_k": 0, "min_p": 0.0},
            GenerationDefaults(eos_ids=(258, 257), temperature=0.0, top_k=0, min_p=0.0),
        ),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
            GenerationDefaults(
                eos_ids=(258,), temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05
            ),
        ),
    ],
)
def test_generation_defaults(
    checkpoint: CheckpointCache,
    tmp_path: Path,
    generation: dict[str, Any] | None,
    expected: GenerationDefaults,
) -> None:
    folder = rewritten(checkpoint("LlamaForCausalLM"), tmp_path / "x", setting())
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_generation(folder) == expected


def test_given_generation_defaults_have_the_names_of_sampling_parameters() -> None:
    defaults = GenerationDefaults(temperature=0.6, top_k=20, max_new_tokens=99)
    assert defaults.sampling() == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}


def test_reading_a_configuration_imports_no_torch() -> None:
    modules = "config", "source", "quantization", "files"
    imports = ";".join(f"import pipeinfer.checkpoint.{module}" for module in modules)
    check = "import sys; assert not {'torch', 'transformers'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", f"{imports};{check}"], check=True, timeout=60)


@pytest.mark.parametrize("architecture", ALL_ARCHITECTURES)
def test_what_is_left_out_is_what_transformers_takes_it_to_be(
    checkpoint: CheckpointCache, tmp_path: Path, architecture: str
) -> None:
    source = checkpoint(architecture)
    whole = read_config(source)
    for field, ours in LEFT_OUT.items():
        # So many heads that the family's number of them for keys divides theirs.
        folder = rewritten(source, tmp_path / field, setting(num_attention_heads=64))
        folder = rewritten(folder, folder, lambda raw, field=field: raw.pop(field, None))
        theirs = AutoConfig.from_pretrained(folder)
        config = read_config(folder)
        assert getattr(config, ours) == getattr(theirs, field), field
        assert type(getattr(config, ours)) is type(getattr(whole, ours))

"""What transformers builds: which models are refused and why, what is asked of attention, weights.

That their tokens are right is tests/parity/test_transformers_backend_parity.py's business.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import CheckpointCache
from dense_attention import dense_causal
from pipeinfer.checkpoint.config import ModelOutline, read_config, read_outline
from pipeinfer.engine.choices import choose_engine
from pipeinfer.engine.loading import load_engine
from pipeinfer.engine.runner import Runner
from pipeinfer.models.loading import build_model, fill_dummy
from pipeinfer.models.transformers_backend import (
    ATTENTION_NAME,
    TransformersForCausalLM,
    inspect_model,
    load_model,
    register_attention,
    run_probe,
)
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.step import AttentionShape
from transformers_checkpoints import (
    SERVED,
    TYPES,
    WINDOW,
    configuration,
    random_model,
    write_configuration,
    write_transformers_checkpoint,
)

CPU = torch.device("cpu")
TRANSFORMERS = Settings(model_impl="transformers", kv_pages=8, threads=1)
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


def model_of(folder: Path, most_tokens: int = 256, **options: Any) -> TransformersForCausalLM:
    outline = read_outline(folder, "transformers")
    spec = inspect_model(folder, outline, most_tokens)
    return load_model(spec, folder, 0, CPU, torch.float32, most_tokens, **options)


# ---------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "ALiBi": ("bloom", "BloomForCausalLM", {}, "ALiBi"),
    "ALiBi of another kind": ("mpt", "MptForCausalLM", {}, "ALiBi"),
    "ALiBi by its configuration": ("falcon", "FalconForCausalLM", {"alibi": True}, "ALiBi"),
    "recurrent state": ("mamba", "MambaForCausalLM", {}, "recurrent state"),
    "some layers with a state": ("qwen3_next", "Qwen3NextForCausalLM", {}, "recurrent state"),
    "latent attention": ("deepseek_v3", "DeepseekV3ForCausalLM", MLA, "latent attention"),
    "latent attention before it": ("deepseek_v2", "DeepseekV2ForCausalLM", MLA, "latent attent"),
    "heads of 512": ("llama", "LlamaForCausalLM", {"head_dim": 512}, "heads have 512 values, and"),
    "attention of its own": ("falcon", "FalconForCausalLM", {}, "does not go through transformers"),
    "chunks": (
        "llama4_text",
        "Llama4ForCausalLM",
        {"layer_types": ["chunked_attention", "full_attention"]},
        "chunked_attention",
    ),
    "RoPE by the longest": (
        "phi3",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
        "--max-model-len 64 works",
    ),
    "no decoder": ("llama", "FlamingoForCausalLM", {}, "unsupported architecture FlamingoForCau"),
}


@pytest.mark.parametrize(("kind", "name", "fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_a_flat_step_cannot_compute_is_refused_by_name_before_weights_are_asked_for(
    tmp_path: Path, kind: str, name: str, fields: dict[str, Any], reason: str
) -> None:
    folder = write_configuration(tmp_path, kind, name, **fields)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        choose_engine(TRANSFORMERS, folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rope_by_the_longest_sequence_is_served_where_none_is_long_enough_to_change_it(
    tmp_path: Path,
) -> None:
    kind, name, fields, _ = REFUSED["RoPE by the longest"]
    folder = write_configuration(tmp_path, kind, name, **fields)
    assert choose_engine(Settings(model_impl="transformers", max_model_len=64), folder).layers == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tp": 2}, "--tp 1, not 2"),
        ({"compile": True}, "--compile is for"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel is for"),
        ({"max_model_len": 257}, "257 is more than the checkpoint's 256"),
    ],
)
def test_settings_that_transformers_models_do_not_have_are_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    folder = write_configuration(tmp_path, "olmo2", "Olmo2ForCausalLM")
    with pytest.raises(ConfigurationError, match=reason):
        choose_engine(Settings(**settings), folder)


def test_quantized_checkpoints_and_gguf_files_are_refused(tmp_path: Path) -> None:
    folder = write_configuration(tmp_path, "olmo2", "Olmo2ForCausalLM")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigurationError, match="quantization_config is not supported for Olmo2"):
        read_outline(folder)
    folder = write_configuration(tmp_path / "plain", "olmo2", "Olmo2ForCausalLM")
    with pytest.raises(
        ConfigurationError, match="--quantization fp8: Olmo2ForCausalLM is built by"
    ):
        choose_engine(Settings(quantization="fp8", load_format="dummy"), folder)
    with pytest.raises(ConfigurationError, match=r"--model-impl transformers: .* GGUF file"):
        read_outline(tmp_path / "model.gguf", "transformers")


def test_an_architecture_that_pipeinfer_lacks_is_refused_where_its_own_is_asked_for(
    tmp_path: Path,
) -> None:
    folder = write_configuration(tmp_path, "olmo2", "Olmo2ForCausalLM")
    with pytest.raises(ConfigurationError, match="unsupported architecture Olmo2ForCausalLM"):
        read_outline(folder, "pipeinfer")


def test_no_python_of_a_checkpoint_runs(tmp_path: Path) -> None:
    code = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"
    raw = {
        "architectures": ["OwnForCausalLM"], "model_type": "own", "vocab_size": 8,
        "max_position_embeddings": 8,
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }  # fmt: skip
    (tmp_path / "own.py").write_text(code)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigurationError, match="OwnForCausalLM"):
        choose_engine(TRANSFORMERS, tmp_path)
    assert not list(tmp_path.rglob("ran"))


def test_a_model_whose_tokens_depend_on_their_neighbours_is_refused_when_it_is_tried() -> None:
    """A convolution over tokens, which no field of a configuration needs to admit."""
    register_attention()
    fields = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    model = random_model(configuration("lfm2", **fields))
    model.set_attn_implementation(ATTENTION_NAME)
    shapes = [AttentionShape(4, 2, 16, 0.25)]
    outline = ModelOutline("Lfm2ForCausalLM", 264, 256, "float32")
    with pytest.raises(ConfigurationError, match="depend on those beside them"):
        run_probe(model, shapes, outline, 256)


def test_a_model_whose_positions_are_counted_in_the_row_is_refused_when_it_is_tried() -> None:
    register_attention()
    model = random_model(configuration("llama"))
    model.set_attn_implementation(ATTENTION_NAME)
    forward = model.model.forward
    model.model.forward = lambda position_ids, **rest: forward(**rest)
    shapes = [AttentionShape(4, 2, 16, 0.25)] * 2
    outline = ModelOutline("LlamaForCausalLM", 264, 256, "float32")
    with pytest.raises(ConfigurationError, match="positions that are counted"):
        run_probe(model, shapes, outline, 256)


# ------------------------------------------------------------------------------------- attention


def shapes_of(folder: Path, model_type: str, architecture: str, **fields: Any):
    write_configuration(folder, model_type, architecture, **fields)
    spec = inspect_model(folder, read_outline(folder, "transformers"), 256)
    return spec.attention


def test_scale_cap_and_window_of_each_layer_are_what_the_model_says(tmp_path: Path) -> None:
    traced = shapes_of(tmp_path, "gemma2", "Gemma2ForCausalLM")
    full = AttentionShape(4, 2, 16, 24**-0.5, None, soft_cap=2.0)
    assert traced.shapes == (replace(full, sliding_window=WINDOW), full)
    assert (traced.head_dim, traced.soft_cap, traced.sinks) == (16, True, False)


def test_a_window_is_found_in_the_mask_whatever_its_length(tmp_path: Path) -> None:
    for window in (1, 2, 4096, 131_072):
        traced = shapes_of(
            tmp_path, "ministral", "MinistralForCausalLM", sliding_window=window, layer_types=TYPES
        )
        assert [shape.sliding_window for shape in traced.shapes] == [window, None]


def test_sinks_are_those_of_the_weights(tmp_path: Path) -> None:
    folder = write_transformers_checkpoint(tmp_path, "gpt_oss")
    model = model_of(folder)
    stored = load_file(folder / "model.safetensors")
    for layer, shape in enumerate(model.attention_shapes()):
        assert shape.sinks is not None
        assert torch.equal(shape.sinks, stored[f"model.layers.{layer}.self_attn.sinks"])


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["granite", "gemma3_text", "gpt_bigcode"])
def test_padded_heads_attend_as_those_without_padding(tmp_path: Path, model_type: str) -> None:
    extra = {"head_dim": 16, "sliding_window": WINDOW} if model_type not in SERVED else {}
    folder = write_transformers_checkpoint(tmp_path, model_type, **extra)
    tokens, positions = torch.arange(40), torch.arange(40)
    found = []
    for head_dim in (0, 64):
        model = model_of(folder, head_dim=head_dim)
        shapes = model.attention_shapes()
        assert {shape.head_dim for shape in shapes} == {max(head_dim, 16)}
        found.append(model.logits(model(tokens, positions, dense_causal(shapes))))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_rows_are_chosen_before_the_head(tmp_path: Path) -> None:
    model = model_of(write_transformers_checkpoint(tmp_path, "granite"))
    attend, rows = dense_causal(model.attention_shapes()), torch.tensor([2, 9])
    tokens = positions = torch.arange(12)
    whole = model(tokens, positions, attend)
    some = model(tokens.int(), positions.int(), attend, rows)
    assert torch.equal(some, whole[rows])
    assert model.local_logits(some).shape == (2, model.vocab_shard.vocab_size)


# --------------------------------------------------------------------------------------- weights


def test_a_checkpoint_without_a_tensor_is_refused_and_one_with_more_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_transformers_checkpoint(tmp_path, "olmo2")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"lacks 1 tensors .*layers\.1\.mlp\.up_proj"):
        model_of(folder)
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": gone[:5]}, path, {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"in another shape 1 .*layers\.1\.mlp"):
        model_of(folder)
    more = {"model.layers.1.mlp.up_proj.weight": gone, "model.more": gone.clone()}
    save_file(tensors | more, path, {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        model_of(folder)
    assert "ignoring 1 tensors that the model lacks: model.more" in caplog.text


def test_tied_weights_are_no_missing_ones(tmp_path: Path) -> None:
    folder = write_transformers_checkpoint(tmp_path, "olmo2", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert model_of(folder).vocab_shard.vocab_size == 264


def test_no_pickle_is_read(tmp_path: Path) -> None:
    folder = write_transformers_checkpoint(tmp_path, "olmo2")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="safetensors"):
        model_of(folder)


@torch.inference_mode()
def test_dummy_weights_are_a_function_of_the_seed_and_need_no_file(tmp_path: Path) -> None:
    folder = write_configuration(tmp_path, "granite", "GraniteForCausalLM")
    spec = inspect_model(folder, read_outline(folder), 256)
    tokens = positions = torch.arange(12)
    found = []
    for seed in (0, 0, 1):
        model = load_model(spec, None, seed, CPU, torch.float32, 256)
        attend = dense_causal(model.attention_shapes())
        found.append(model.logits(model(tokens, positions, attend)))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    assert float(found[0].std()) > 0


@torch.inference_mode()
def test_dummy_weights_are_those_of_our_own_implementation(tmp_path: Path) -> None:
    folder = CheckpointCache(tmp_path)("LlamaForCausalLM")
    tokens = positions = torch.arange(12)
    own = build_model(read_config(folder))
    fill_dummy(own, 5)
    spec = inspect_model(folder, read_outline(folder, "transformers"), 256)
    theirs = load_model(spec, None, 5, CPU, torch.float32, 256)
    found = [
        model.logits(model(tokens, positions, dense_causal(model.attention_shapes())))
        for model in (own, theirs)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_asked_dtype_is_that_of_the_pool_and_the_logits(tmp_path: Path, dtype: str) -> None:
    folder = write_transformers_checkpoint(tmp_path, "olmo2")
    engine = load_engine(Settings(dtype=dtype, kv_pages=8, threads=1), folder)
    assert str(engine.runner.pool.dtype) == f"torch.{dtype}"


# ---------------------------------------------------------------------------------------- the rest


def fail(*given: object, **named: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def test_a_model_that_no_graph_can_hold_is_served_without_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Runner, "capture", fail)
    with caplog.at_level(logging.WARNING):
        folder = write_transformers_checkpoint(tmp_path / "theirs", "olmo2")
        assert load_engine(TRANSFORMERS, folder).graph_sizes == ()
    (line,) = [entry.message for entry in caplog.records if "CUDA graphs" in entry.message]
    assert line.endswith("kernel by kernel: operation not permitted when stream is capturing")
    own = CheckpointCache(tmp_path / "own")("LlamaForCausalLM")
    with pytest.raises(RuntimeError, match="capturing"):
        load_engine(Settings(kv_pages=8, threads=1), own)


def test_the_context_is_found_under_the_names_that_configurations_use(tmp_path: Path) -> None:
    for name in ("n_positions", "max_position_embeddings"):
        raw = {"architectures": ["AnyLMHeadModel"], "vocab_size": 9, name: 77}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert read_outline(tmp_path) == ModelOutline("AnyLMHeadModel", 9, 77, "float32")
    del raw["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigurationError, match="max_position_embeddings is missing"):
        read_outline(tmp_path)


def test_our_own_models_are_built_without_transformers(tmp_path: Path) -> None:
    folder = CheckpointCache(tmp_path)("LlamaForCausalLM")
    program = (
        "import sys; from pathlib import Path\n"
        "from pipeinfer.engine.loading import load_engine\n"
        "from pipeinfer.settings import Settings\n"
        f"load_engine(Settings(kv_pages=8, threads=1), Path({str(folder)!r}))\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

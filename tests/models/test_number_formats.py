"""Checkpoints in other number formats give the logits of the same values as plain weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CheckpointCache, load_reference
from dense_attention import dense_causal
from pipeinfer.checkpoint.config import read_config
from pipeinfer.checkpoint.quantization import choose_quantization
from pipeinfer.engine.choices import choose_engine
from pipeinfer.kernels.formats import quantize_rows, quantize_rows_min_error
from pipeinfer.layers import weight
from pipeinfer.models.loading import build_model, check_checkpoint, fill_dummy, load_weights
from pipeinfer.settings import ConfigurationError, Settings
from quantized_checkpoints import FORMATS, quantize

LENGTH = 32
TOLERANCE = 1e-4


@torch.inference_mode()
def logits(folder: Path, asked: str = "auto") -> torch.Tensor:
    config = read_config(folder)
    config = replace(config, quantization=choose_quantization(config.quantization, asked))
    check_checkpoint(folder, config)
    model = build_model(config)
    load_weights(model, folder)
    attend = dense_causal(model.attention_shapes())
    return model.logits(model(tokens(), torch.arange(LENGTH), attend))


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def difference(quantized: Path, plain: Path) -> float:
    """max |ours - theirs| / max |theirs|."""
    theirs = load_reference(plain)(tokens()[None]).logits[0]
    return float((logits(quantized) - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "mxfp4"])
def test_format_is_decoded(checkpoint: CheckpointCache, tmp_path: Path, form: str) -> None:
    source = checkpoint("Qwen2ForCausalLM")
    quantized, plain = quantize(source, tmp_path, form)
    assert difference(quantized, plain) < TOLERANCE
    assert difference(source, plain) > 10 * TOLERANCE, "rounding is to be seen"


@pytest.mark.parametrize(
    "architecture",
    ["GlmForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Glm4MoeForCausalLM"],
)
@pytest.mark.parametrize("form", ["fp8 rows", "fp8 blocks", "awq"])
def test_format_of_experts_and_of_interleaved_heads(
    checkpoint: CheckpointCache, tmp_path: Path, architecture: str, form: str
) -> None:
    sizes = {"shared_expert_intermediate_size": 64} if "Qwen2Moe" in architecture else {}
    quantized, plain = quantize(checkpoint(architecture, **sizes), tmp_path, form)
    assert difference(quantized, plain) < TOLERANCE


def test_experts_in_mxfp4(checkpoint: CheckpointCache, tmp_path: Path) -> None:
    source = checkpoint("GptOssForCausalLM")
    quantized, plain = quantize(source, tmp_path, "mxfp4")
    assert difference(quantized, plain) < TOLERANCE
    assert difference(source, plain) > 10 * TOLERANCE, "rounding is to be seen"


@pytest.mark.parametrize("kept", ["mlp", "model.layers.1", "self_attn.o_proj"])
def test_modules_that_are_left_out_are_plain(
    checkpoint: CheckpointCache, tmp_path: Path, kept: str
) -> None:
    quantized, plain = quantize(checkpoint("LlamaForCausalLM"), tmp_path, "awq", kept)
    assert difference(quantized, plain) < TOLERANCE


@torch.inference_mode()
def test_plain_weights_are_rounded_as_they_are_loaded(
    checkpoint: CheckpointCache, tmp_path: Path
) -> None:
    """--quantization fp8: each row as closely as one of eight scales lets it."""
    source = checkpoint("Qwen3MoeForCausalLM")
    _, plain = quantize(source, tmp_path, "fp8 closest rows")
    theirs = load_reference(plain)(tokens()[None]).logits[0]
    ours = logits(source, asked="fp8")
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE
    assert difference(source, plain) > 10 * TOLERANCE, "rounding is to be seen"


@pytest.mark.parametrize("form", FORMATS)
def test_random_weights_in_any_format_are_like_plain_ones(
    checkpoint: CheckpointCache, tmp_path: Path, form: str
) -> None:
    architecture = "GptOssForCausalLM" if form == "mxfp4" else "Qwen3MoeForCausalLM"
    quantized, _ = quantize(checkpoint(architecture), tmp_path, form)
    model = build_model(read_config(quantized))
    seen: list[torch.Tensor] = []
    reordered = weight.reordered

    def spy(matrix: torch.Tensor) -> torch.Tensor:
        seen.append(matrix.clone())
        return reordered(matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight, "reordered", spy)
        fill_dummy(model)
    assert all(0.01 < float(one.std()) < 0.04 for one in seen)
    assert all(abs(float(one.mean())) < 0.01 for one in seen)
    assert len({float(one.sum()) for one in seen}) == len(seen) > 0, "each is its own"


ASKED = [
    ("awq", "auto", None),
    ("awq", "awq", None),
    ("awq", "none", None),
    ("fp8 rows", "fp8", None),
    ("fp8 blocks", "fp8", None),
    ("awq", "fp8", "--quantization fp8: the checkpoint's weights are awq"),
    ("gptq", "awq", "--quantization awq: the checkpoint's weights are gptq"),
    (None, "gptq", "--quantization gptq: the checkpoint's weights are plain"),
    (None, "none", None),
]


@pytest.mark.parametrize(("form", "asked", "refusal"), ASKED)
def test_what_is_asked_for_and_what_is_stored_fit_or_are_refused(
    checkpoint: CheckpointCache, tmp_path: Path, form: str | None, asked: str, refusal: str | None
) -> None:
    folder = checkpoint("LlamaForCausalLM")
    if form is not None:
        folder, _ = quantize(folder, tmp_path, form)
    settings = Settings(quantization=asked)  # type: ignore[arg-type]
    if refusal is None:
        assert choose_engine(settings, folder).stored is not None
        return
    with pytest.raises(ConfigurationError, match=refusal):
        choose_engine(settings, folder)


BLOCKS, AWQ, GPTQ = (FORMATS[form][0] for form in ("fp8 blocks", "awq", "gptq"))
FLOATS, PACKED = (FORMATS[form][0] for form in ("fp8 rows", "4 bits"))


def within(how: dict[str, Any], **changed: object) -> dict[str, Any]:
    """A config of compressed-tensors whose weights are `changed`."""
    group = how["config_groups"]["group_0"]
    return how | {"config_groups": {"group_0": group | {"weights": group["weights"] | changed}}}


WRONG: list[tuple[dict[str, Any], str]] = [
    (BLOCKS | {"weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
    (BLOCKS | {"weight_block_size": [0, 128]}, "weight_block_size must be two whole numbers"),
    (BLOCKS | {"weight_block_size": [True, 128]}, "weight_block_size must be two whole numbers"),
    (BLOCKS | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
    (BLOCKS | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported"),
    (BLOCKS | {"modules_to_convert": ["a"]}, "modules_to_convert is not supported"),
    (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
    (AWQ | {"bits": 8}, "bits 8 is not supported, only 4"),
    (AWQ | {"version": "gemv"}, "version 'gemv' is not supported"),
    (AWQ | {"zero_point": False}, "zero_point False is not supported"),
    (AWQ | {"group_size": 48}, "group_size 48 is not supported, only 32, 64, 128"),
    (AWQ | {"group_size": "128"}, "group_size '128' is not supported"),
    (GPTQ | {"desc_act": True}, "desc_act True is not supported, only False"),
    (GPTQ | {"lm_head": True}, "lm_head True is not supported"),
    (GPTQ | {"dynamic": {"a": {}}}, "dynamic, layers of their own, is not supported"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    (FLOATS | {"config_groups": {}}, "must have one scheme"),
    (FLOATS | {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
    (FLOATS | {"sparsity_config": {"format": "sparse"}}, "sparsity_config"),
    (FLOATS | {"ignore": ["re:(a+)+$"]}, "may take too long to match"),
    (FLOATS | {"ignore": ["re:.*.*.*.*x"]}, "may take too long to match"),
    (FLOATS | {"ignore": ["re:["]}, "cannot be read"),
    (FLOATS | {"ignore": ["re:.*q_proj"]}, "q_proj is left out and .*k_proj is not"),
    (within(FLOATS, num_bits=4), "num_bits 4 is not supported, only 8"),
    (within(FLOATS, strategy="group"), "strategy 'group' is not supported"),
    (within(PACKED, num_bits=8), "num_bits 8 is not supported, only 4"),
    (within(PACKED, actorder="group"), "actorder 'group' is not supported"),
]


@pytest.mark.parametrize(("how", "named"), WRONG, ids=[named[:40] for _, named in WRONG])
def test_what_would_be_computed_wrongly_is_refused_by_name(
    checkpoint: CheckpointCache, tmp_path: Path, how: dict[str, Any], named: str
) -> None:
    folder = shutil.copytree(checkpoint("LlamaForCausalLM"), tmp_path / "wrong")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    with pytest.raises(ConfigurationError, match=named):
        choose_engine(Settings(), folder)


def test_a_weight_that_is_not_in_the_format_that_config_json_names_is_refused(
    checkpoint: CheckpointCache, tmp_path: Path
) -> None:
    folder, plain = quantize(checkpoint("LlamaForCausalLM"), tmp_path, "fp8 rows")
    shutil.copy(plain / "model.safetensors", folder)
    with pytest.raises(ConfigurationError, match="is F32; supported: F8_E4M3"):
        choose_engine(Settings(), folder)


def test_a_scheme_for_keys_and_values_alone_leaves_weights_plain(
    checkpoint: CheckpointCache, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("LlamaForCausalLM"), tmp_path / "scheme")
    how = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    assert read_config(folder).quantization is None


def test_weights_are_rounded_more_closely_than_by_their_largest_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 16, (64, 512), generator=generator) - 7.0  # as 4 bits leave them
    values = torch.cat([levels * 0.013, torch.randn(64, 512, generator=generator)])
    values[3] = 0.0

    def error(rounded: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (rounded.float() * scale - values).square().sum(1)

    plain, close = error(*quantize_rows(values)), error(*quantize_rows_min_error(values))
    assert (close <= plain).all() and close[3] == 0
    assert close[:64].sum() < 0.7 * plain[:64].sum(), "few levels, and a scale that meets them"

"""Checkpoints in other number formats give the logits of the same values as plain weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import CheckpointCache, load_reference
from dense_attention import dense_causal
from pipeinfer.checkpoint.config import read_config
from pipeinfer.models.build import build_model
from pipeinfer.models.loading import check_checkpoint, load_weights
from quantized_checkpoints import FORMATS, quantize

LENGTH = 32
TOLERANCE = 1e-4


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    config = read_config(folder)
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

"""Angles of every RoPE type equal transformers' at the sizes of real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pipeinfer.checkpoint.config import read_config
from pipeinfer.layers.attention import Rope, rotate

REAL: dict[str, tuple[int, dict[str, Any]]] = {
    "llama 2": (4096, {"rope_type": "default", "rope_theta": 10_000.0}),
    "llama 3.1": (
        131_072,
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen 2.5 with yarn": (
        131_072,
        {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32_768,
        },
    ),
    "vicuna 16k": (4096, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    "dynamic": (4096, {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}),
}


def both(tmp_path: Path, limit: int, rope: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Rope]:
    """(transformers' embedding, ours) of a config.json that transformers wrote; head size 128."""
    theirs = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=limit,
        rope_parameters=dict(rope),
        architectures=["LlamaForCausalLM"],
    )
    (tmp_path / "config.json").write_text(json.dumps(theirs.to_dict()))
    config = read_config(tmp_path)
    ours = Rope(config.rope, config.head_dim, dtype, torch.device("cpu"), limit)
    return LlamaRotaryEmbedding(theirs), ours


@pytest.mark.parametrize(("limit", "rope"), REAL.values(), ids=REAL)
def test_angles_equal_transformers_up_to_the_last_position(
    tmp_path: Path, limit: int, rope: dict[str, Any]
) -> None:
    theirs, ours = both(tmp_path, limit, rope, torch.float32)
    positions = torch.cat([torch.arange(300), torch.randint(0, limit, (500,))])
    positions = torch.cat([positions, torch.tensor([limit - 1])])
    cos, sin = theirs(torch.empty(1), positions[None])
    angles = ours(positions).cos_sin
    sin[..., :64] *= -1
    for got, expected in ((angles.cos, cos), (angles.sin, sin)):
        # An angle of 1e5 has a float32 step of 0.008: equality needs the same frequencies.
        torch.testing.assert_close(got[:, 0], expected[0], rtol=0, atol=0.02)
        torch.testing.assert_close(got[:300, 0], expected[0, :300], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("limit", "rope"), REAL.values(), ids=REAL)
def test_the_table_has_the_angles_of_every_position(
    tmp_path: Path, limit: int, rope: dict[str, Any]
) -> None:
    """To the last bits: what is computed for many at once is vectorized otherwise."""
    _, ours = both(tmp_path, limit, rope, torch.float32)
    positions = torch.cat([torch.randint(0, limit, (50,)), torch.tensor([0, limit - 1])])
    for table, angles in zip(ours.cos_sin_table, ours.cos_sin(positions), strict=True):
        assert table.shape == (limit, 64)
        torch.testing.assert_close(table[positions], angles[:, 0, 64:], rtol=0, atol=1e-6)


@torch.inference_mode()
def test_angles_are_computed_once_for_all_layers_of_a_step(tmp_path: Path, monkeypatch) -> None:
    _, ours = both(tmp_path, *REAL["llama 2"], torch.float32)
    asked, angles = [], ours.cos_sin
    monkeypatch.setattr(ours, "cos_sin", lambda at: asked.append(at) or angles(at))
    rotation = ours(torch.arange(3))
    assert rotation.cos_sin is rotation.cos_sin
    assert len(asked) == 1


def test_dynamic_angles_depend_on_the_position_alone(tmp_path: Path) -> None:
    """Past the original context too: however a prompt is chunked, a key is rotated alike."""
    theirs, ours = both(tmp_path, *REAL["dynamic"], torch.float32)
    positions = torch.tensor([10, 4095, 4096, 9000, 16_000])
    together = ours.cos_sin(positions)
    for row, position in enumerate(positions):
        alone = ours.cos_sin(position[None])
        assert torch.equal(together.cos[row], alone.cos[0])
        cos, _ = theirs(torch.empty(1), torch.arange(int(position) + 1)[None])
        torch.testing.assert_close(alone.cos[0, 0], cos[0, -1], rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_heads_equal_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs, ours = both(tmp_path, *REAL["llama 2"], dtype)
    positions = torch.tensor([0, 1, 7, 500])
    buffer = torch.randn(4, 10, 128).to(dtype)
    heads = buffer[:, :6]  # as in a merged projection: rows are further apart than they are long
    before = buffer.clone()
    cos, sin = theirs(torch.empty(1, dtype=dtype), positions[None])
    batched = heads.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(batched, batched, cos, sin)
    got = rotate(heads, ours.cos_sin(positions))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=0, atol=tolerance)
    assert torch.equal(buffer, before)
    assert got.is_contiguous()

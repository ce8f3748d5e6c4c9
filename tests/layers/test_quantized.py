"""Matrices that stay in whole numbers of eight or four bits, on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.checkpoint.quantization import Int4Blocks, Int8, Quantization
from pipeinfer.engine import choices
from pipeinfer.layers.linear import Embedding, LMHead, VocabParallelWeight, create_weight
from pipeinfer.layers.placement import Placement, Shard
from pipeinfer.layers.quantized import (
    DEQUANTIZE_BLOCKS_MIN_ROWS,
    DEQUANTIZE_MIN_ROWS,
    INT8_MAX,
    Int8Tensor,
    packed_int4_rows,
)
from pipeinfer.layers.weight import QuantizedWeight
from pipeinfer.settings import ConfigurationError, Settings

CPU = torch.device("cpu")
HALF = torch.bfloat16


def placement(dtype: torch.dtype = HALF, shard: Shard | None = None) -> Placement:
    quantization = Quantization("int8", Int8())
    return Placement(shard or Shard(), dtype, CPU, quantization=quantization)


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-2, 1, rows)[:, None]
    return torch.randn(rows, columns, generator=generator) * scales


def filled(held, full: torch.Tensor) -> None:
    for source in held.sources("w", slice(0, full.shape[0]), full.shape, (slice(None),) * 2):
        source.target.copy_(full[source.slices])


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 1000))
def test_a_value_is_rounded_by_half_a_step_of_its_row(rows: int, columns: int, seed: int) -> None:
    full = matrix(rows, columns, seed)
    full[0] = 0
    values = Int8Tensor.empty((rows, columns), Int8(), placement(torch.float32))
    filled(values, full)
    step = full.abs().amax(1, keepdim=True) / INT8_MAX
    assert ((values.dequantized(torch.float32) - full).abs() <= step * 0.5001 + 1e-9).all()
    assert values.weight.abs().amax(1)[1:].eq(INT8_MAX).all(), "a row has all the numbers there are"
    ids = torch.tensor([rows - 1, 0])
    assert torch.equal(values.lookup(ids), values.dequantized(torch.float32)[ids])


@pytest.mark.parametrize(
    "count", [1, 5, DEQUANTIZE_MIN_ROWS - 1, DEQUANTIZE_MIN_ROWS, 3 * DEQUANTIZE_MIN_ROWS]
)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_the_plain_matrix(count: int, bias: bool) -> None:
    added = torch.randn(48).to(HALF) if bias else None
    held = create_weight(placement(), ["w"], (48, 64), added)
    assert isinstance(held, QuantizedWeight)
    filled(held, matrix(48, 64))
    held.pack()
    x = torch.randn(count, 64).to(HALF)
    plain = held._quantized.dequantized(torch.float32)
    expected = x.float() @ plain.t() + (0 if added is None else added.float())
    got = held(x)
    assert got.dtype == HALF and got.shape == (count, 48)
    assert (got.float() - expected).norm() < 4e-3 * expected.norm()


def test_few_rows_come_out_alike_however_many_there_are() -> None:
    held = create_weight(placement(), ["w"], (48, 64), None)
    filled(held, matrix(48, 64))
    x = torch.randn(DEQUANTIZE_MIN_ROWS - 1, 64).to(HALF)
    whole = held(x)
    for size in (1, 2, 3, 7, 16):
        assert torch.equal(torch.cat([held(part) for part in x.split(size)]), whole)


@pytest.mark.parametrize(("columns", "dtype"), [(64, torch.float32), (72, HALF)])
def test_a_matrix_that_has_no_product_becomes_plain(columns: int, dtype: torch.dtype) -> None:
    held = create_weight(placement(dtype), ["w"], (8, columns), None)
    filled(held, matrix(8, columns))
    held.pack()
    assert not isinstance(held, QuantizedWeight)
    assert held(torch.zeros(3, columns, dtype=dtype)).shape == (3, 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_head_and_embedding_share_their_numbers(rank: int) -> None:
    """Of 45 ids the second of two ranks has 22, and a row of zeros."""
    at = placement(shard=Shard(rank, 2))
    rows = VocabParallelWeight("embed", 45, 64, at)
    full = matrix(45, 64)
    for source in rows.sources("model."):
        assert source.name == "model.embed.weight"
        source.target.copy_(full[source.slices])
    held = full[rows.start : rows.stop]
    ids = torch.arange(rows.stop - rows.start)
    looked_up = rows.lookup()(ids).float()
    assert (looked_up - held).norm() < 0.01 * held.norm()
    x = torch.randn(3, 64).to(HALF)
    logits = LMHead(rows, at).local_logits(x).float()
    expected = x.float() @ looked_up.t()
    assert (logits[:, : len(held)] - expected).norm() < 4e-3 * expected.norm()
    assert not logits[:, len(held) :].any()
    if rank == 0:
        alone = VocabParallelWeight("embed", 45, 64, placement())
        assert Embedding(alone, placement())(torch.tensor([3, 3])).shape == (2, 64)


@pytest.mark.parametrize(
    ("stored", "device", "fast", "expected"),
    [
        ("bfloat16", "cpu", True, HALF),
        ("bfloat16", "cpu", False, torch.float32),
        ("float16", "cpu", True, torch.float32),
        ("float32", "cpu", True, torch.float32),
        ("bfloat16", "cuda", False, HALF),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_it_has_instructions_for_it(
    monkeypatch, stored, device, fast, expected
) -> None:
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: fast)
    outline = choices.ModelOutline("LlamaForCausalLM", 10, 10, stored)
    assert choices._dtype("auto", outline, device) == expected
    assert choices._dtype("float32", outline, device) == torch.float32


def test_eight_bits_are_refused_where_nothing_multiplies_them() -> None:
    for device, dtype in (("cpu", torch.float32), ("cuda", HALF)):
        with pytest.raises(ConfigurationError, match="--quantization int8 is for CPUs"):
            choices._quantization(Settings(quantization="int8"), Path("model"), device, dtype)
    assert choices._quantization(Settings(), Path("model"), "cpu", HALF) == ("auto", frozenset())


def in_4_bits(names: set[str]) -> Placement:
    how = Quantization("int8", Int8(), int4_modules=frozenset(names))
    return Placement(Shard(), HALF, CPU, quantization=how)


def fill_blocks(held: QuantizedWeight, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random blocks of a file; returns their values, float32 [rows, columns]."""
    rng = np.random.default_rng(seed)
    size = (rows, columns // Int4Blocks.group, Int4Blocks.group)
    numbers = rng.integers(0, 16, size, dtype=np.uint8)
    floats = rng.standard_normal((rows, columns // Int4Blocks.group, 2)).astype(np.float32)
    floats = torch.from_numpy(floats).to(HALF).float().numpy()  # without more bits than are kept
    packed = numbers[..., :16] | numbers[..., 16:] << 4
    blocks = torch.from_numpy(np.concatenate((packed, floats.view(np.uint8)), -1))
    values = (numbers.astype(np.float32) - 8) * floats[..., :1] + floats[..., 1:]
    (source,) = held.sources(
        "w", slice(0, rows), (rows, columns), (slice(0, rows), slice(0, columns))
    )
    assert source.blocks and source.shape == (rows, columns)
    half = rows // 2
    for part in (slice(0, half), slice(half, rows)):  # as a reader fills it, piece by piece
        source.target[part].copy_(blocks[part])
    return torch.from_numpy(values.reshape(rows, columns))


FEW, MANY = DEQUANTIZE_BLOCKS_MIN_ROWS - 1, DEQUANTIZE_BLOCKS_MIN_ROWS
NO_BLOCKS = pytest.mark.skipif(not packed_int4_rows(), reason="torch packs no 4 bits here")


@NO_BLOCKS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (192, 96), (128, 576)])
def test_products_with_blocks_of_4_bits_are_those_of_their_values(rows, columns, bias) -> None:
    added = torch.randn(rows).to(HALF) if bias else None
    held = create_weight(in_4_bits({"w"}), ["w"], (rows, columns), added)
    assert isinstance(held, QuantizedWeight)
    values = fill_blocks(held, rows, columns)
    assert torch.equal(held._quantized.dequantized(torch.float32), values)
    order = torch.arange(rows - 2).flip(0)
    held.permute(order)
    values[: rows - 2] = values[order]
    held.pack()
    for count in (1, 5, FEW, MANY, 3 * MANY):
        x = torch.randn(count, 2 * columns).to(HALF)[:, ::2]
        expected = x.float() @ values.t() + (0 if added is None else added.float())
        got = held(x)
        assert got.dtype == HALF and got.shape == (count, rows)
        assert (got.float() - expected).norm() < 5e-3 * expected.norm(), count


@NO_BLOCKS
def test_few_rows_of_products_with_4_bits_come_out_alike_however_many_there_are() -> None:
    held = create_weight(in_4_bits({"w"}), ["w"], (128, 96), None)
    fill_blocks(held, 128, 96)
    held.pack()
    x = torch.randn(FEW, 96).to(HALF)
    whole = held(x)
    for size in (1, 2, 3, 7, 16):
        assert torch.equal(torch.cat([held(part) for part in x.split(size)]), whole)


@pytest.mark.parametrize(
    ("names", "size"),
    [(["w", "v"], (64, 64)), (["w"], (72, 64)), (["w"], (64, 48))],
    ids=["beside one in 8 bits", "rows do not divide", "columns do not divide"],
)
def test_a_matrix_of_4_bits_that_has_no_product_is_rounded_to_8(names, size) -> None:
    held = create_weight(in_4_bits({"w"}), names, size, None)
    assert isinstance(held, QuantizedWeight) and isinstance(held._quantized, Int8Tensor)


def test_where_torch_packs_otherwise_all_matrices_have_8_bits(monkeypatch) -> None:
    monkeypatch.setattr("pipeinfer.layers.quantized.packed_int4_rows", lambda: 0)
    held = create_weight(in_4_bits({"w"}), ["w"], (64, 64), None)
    assert isinstance(held, QuantizedWeight) and isinstance(held._quantized, Int8Tensor)

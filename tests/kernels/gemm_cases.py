"""GEMMs of few rows, and products of many low-rank adapters: for interpreter and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draws import seeded
from kernels.triton_cases import (
    DEVICE,
    HALVES,
    INTERPRETED,
    TOLERANCE,
    randn,
    randn_on_device,
    relative_error,
)
from pipeinfer.kernels import gemm
from pipeinfer.kernels.elementwise import quantize_groups_reference, rms_norm_reference
from pipeinfer.kernels.formats import dequantize_int4, pack_int4, quantize_rows, unpack_int4
from pipeinfer.kernels.gemm import LowRankGemm
from pipeinfer.kernels.interface import LowRankMatrices
from pipeinfer.kernels.tile_configs import GemmConfig, Int4GemmConfig
from pipeinfer.layers.lora import AddLowRank, LowRankOnHost
from pipeinfer.layers.weight import SmallMGemm

WIDTH, DEPTH = 64, 256
SMALL = GemmConfig(block_m=16, block_n=32, block_k=64, split_k=1, num_warps=4, num_stages=3)
TALL = GemmConfig(block_m=64, block_n=32, block_k=64, split_k=1, num_warps=4, num_stages=3)
DTYPES = [torch.float32, *HALVES]


def weights(dtype, width=WIDTH):
    return randn(1, width, DEPTH, dtype=dtype) / 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "rows"), [(SMALL, 1), (SMALL, 16), (SMALL, 19), (TALL, 70)])
def test_skinny_product_is_that_of_the_reference(tile, rows, dtype):
    x, weight, bias = randn(0, rows, DEPTH, dtype=dtype), weights(dtype), randn(2, WIDTH)
    bound = 4 * TOLERANCE[dtype]  # a row of 64 values: if half of them are the other neighbour
    expected = gemm.gemm_reference(x, weight)
    assert relative_error(gemm.small_m_gemm(x, weight, tile), expected) < bound
    bias = bias.to(dtype)
    expected = gemm.gemm_reference(x, weight, bias)
    assert relative_error(gemm.small_m_gemm(x, weight, tile, bias), expected) < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "rows"), [(SMALL, 3), (TALL, 64)])
def test_gate_and_up_are_one_skinny_product(tile, rows, dtype):
    x, weight = randn(0, rows, DEPTH, dtype=dtype), weights(dtype, 2 * WIDTH)
    got = gemm.small_m_gemm_swiglu(x, weight, tile)
    assert got.shape == (rows, WIDTH)
    # The reference is not rounded, and a few large values may all be rounded far: by 2^-8 at most.
    assert relative_error(got, gemm.gemm_swiglu_reference(x, weight)) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_splits_of_a_skinny_product_add_up_and_count_the_bias_once(splits, biased):
    tile = GemmConfig(block_m=16, block_n=32, block_k=64, split_k=splits, num_warps=4, num_stages=3)
    x, weight = randn(0, 5, DEPTH), weights(torch.float32)
    bias = randn(2, WIDTH) if biased else None
    got = gemm.split_k_gemm(x, weight, tile, bias)
    assert got.shape == (splits, 5, WIDTH)
    assert got.dtype == torch.float32
    expected = gemm.gemm_reference(x, weight, bias)
    assert relative_error(got.sum(0), expected) < TOLERANCE[torch.float32] * 2


def test_a_skinny_product_reads_strided_rows():
    wide, weight = randn(0, 4, 2 * DEPTH), weights(torch.float32)
    got = gemm.small_m_gemm(wide[:, :DEPTH], weight, SMALL)
    assert torch.equal(got, gemm.small_m_gemm(wide[:, :DEPTH].contiguous(), weight, SMALL))


def test_a_row_of_a_skinny_product_does_not_depend_on_the_others():
    x, weight = randn(0, 16, DEPTH), weights(torch.float32)
    assert torch.equal(
        gemm.small_m_gemm(x, weight, SMALL)[3:4], gemm.small_m_gemm(x[3:4], weight, SMALL)
    )


def test_the_norm_adds_the_parts_of_a_skinny_product_to_the_residual():
    products = SmallMGemm()
    size, depth = 1024, 256
    x, weight = randn(0, 3, depth, dtype=torch.float16), randn(1, size, depth, dtype=torch.float16)
    scale, residual = randn(2, size, dtype=torch.float16), randn(3, 3, size, dtype=torch.float16)
    weight /= 16
    expected_sum = residual.float() + gemm.gemm_reference(x, weight)
    partial = products.split_k(x, weight, None)
    assert partial is not None
    normed, total = partial.add_norm(residual, scale, 1e-6)
    assert total is residual
    assert relative_error(total, expected_sum) < 2 * TOLERANCE[torch.float16]
    expected = rms_norm_reference(total.clone(), scale, 1e-6)
    assert relative_error(normed, expected) < 2 * TOLERANCE[torch.float16]


SQUARE = GemmConfig(block_m=16, block_n=32, block_k=64, split_k=1, num_warps=4, num_stages=3)


def in_fp8(width, blocks):
    """(e4m3 weights, their scales, the same as float32)."""
    plain = randn(3, width, DEPTH) / 8
    if not blocks:
        weight, scale = quantize_rows(plain)
        return weight, scale, weight.float() * scale
    tiles = plain.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = tiles.abs().amax((1, 3)) / 448
    weight = (tiles / scale[:, None, :, None]).flatten(0, 1).flatten(1).to(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.contiguous(), scale.contiguous(), weight.float() * wide


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile", "rows"), [(SQUARE, 3), (TALL, 65)])
def test_skinny_products_of_both_sides_in_fp8(tile, rows, dtype, blocks):
    wide, part = randn(0, rows, DEPTH, dtype=dtype), 128 if blocks else 0
    x, x_scale = quantize_groups_reference(wide, part)
    weight, scale, plain = in_fp8(256, blocks)
    scales, bias = gemm.GemmScales(x_scale, scale), randn(2, 256, dtype=dtype)
    exact = x.float() * x_scale.repeat_interleave(part or DEPTH, 1)
    expected = gemm.gemm_reference(exact, plain, bias)
    # Tensor cores add up products of FP8 with fewer bits than float32, and the reference is not
    # rounded.
    bound = 4 * TOLERANCE[dtype] if INTERPRETED else max(4 * TOLERANCE[dtype], 2e-3)
    got = gemm.small_m_gemm(x, weight, tile, bias, scales, dtype)
    assert got.dtype == dtype and relative_error(got, expected) < bound
    got = gemm.split_k_gemm(x, weight, replace(tile, split_k=2), bias, scales)
    assert got.dtype == torch.float32 and relative_error(got.sum(0), expected) < bound


@pytest.mark.parametrize("rows", [3, 65, 140])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_and_weights_in_blocks_of_fp8(rows, biased):
    x, x_scale = quantize_groups_reference(randn(0, rows, 256), 128)
    weight = (randn(1, 384, 256) * 50).to(torch.float8_e4m3fn)
    scale, bias = randn(2, 3, 2).abs() / 100, randn(3, 384) if biased else None
    got = gemm.block_scaled_gemm(x, x_scale, weight, scale, torch.float32, bias)
    expected = gemm.block_scaled_gemm_reference(x, x_scale, weight, scale, bias)
    # Tensor cores add up products of FP8 with fewer bits than float32.
    assert relative_error(got, expected) < (1e-5 if INTERPRETED else 2e-3)


def in_4_bits(group, dtype=torch.float32):
    width, depth = 64, 512
    source = seeded(group)
    numbers = torch.randint(0, 16, (width, depth), generator=source, dtype=torch.uint8)
    zero = torch.randint(0, 17, (width, depth // group), generator=source, dtype=torch.uint8)
    scale = (randn(4, width, depth // group).abs() / 20 + 0.01).to(dtype)
    words = pack_int4(numbers)
    assert torch.equal(unpack_int4(words), numbers)
    kept = torch.stack((scale, zero.to(scale)), dim=-1)
    return words.transpose(0, 1).contiguous().to(scale.device), kept.transpose(0, 1).contiguous()


def plain_of(values, dtype):
    numbers, kept = values
    scale, zero = kept.permute(2, 1, 0)
    return dequantize_int4(numbers.transpose(0, 1), scale, zero, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 32, 64, 128, 512])
def test_weights_in_4_bits_are_decoded(group, dtype):
    values = in_4_bits(group, dtype)
    assert torch.equal(gemm.int4_dequantize(*values, dtype), plain_of(values, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "rows"), [(16, 1), (32, 3), (64, 1), (128, 5), (512, 19)])
@pytest.mark.parametrize("splits", [1, 4])
def test_few_rows_are_multiplied_with_weights_in_4_bits(splits, group, rows, dtype):
    wide, values = randn(5, rows, 1024, dtype=dtype), in_4_bits(group, dtype)
    x, bias = wide[:, :512], randn(6, 64)
    how = Int4GemmConfig(16, 64, 1 if splits == 4 else 2, splits, 4)
    got = gemm.int4_small_m_gemm(x, *values, how, bias)
    assert got.shape == (splits, rows, 64) and got.dtype == torch.float32
    expected = torch.nn.functional.linear(x.float(), plain_of(values, dtype).float(), bias)
    assert relative_error(got.sum(0), expected) < 2 * TOLERANCE[dtype]
    arrived = torch.zeros(2, dtype=torch.int32, device=x.device)
    for _ in range(2):
        [whole] = gemm.int4_small_m_gemm(x, *values, how, bias, arrived)
        assert torch.equal(whole, in_order(got).to(dtype)) and not arrived.any()


def in_order(parts):
    whole = torch.zeros_like(parts[0])
    for part in parts:
        whole += part
    return whole


SLOTS = 3
PARTS = {
    "one module": (slice(0, 200),),
    "three modules": (slice(0, 130), slice(130, 162), slice(162, 200)),
    "four modules": (slice(0, 10), slice(10, 20), slice(20, 30), slice(30, 200)),
}


def slots_of(kind: str, tokens: int) -> torch.Tensor:
    """The adapter slot of each token."""
    if kind == "none":
        found = torch.zeros(tokens)
    elif kind == "runs":
        found = torch.arange(tokens) * (SLOTS + 1) // tokens
    else:
        found = torch.randint(0, SLOTS + 1, (tokens,), generator=seeded(0))
    return found.to(torch.int32).to(DEVICE)


def add_low_rank(kernel: AddLowRank, token_adapters, x, *matrices_and_y) -> None:
    *matrices, y = matrices_and_y
    kernel.begin_step(token_adapters, SLOTS)
    kernel(x, LowRankMatrices(*matrices), y)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize(("rank", "depth"), [(4, 72), (16, 1100), (100, 256)])
@pytest.mark.parametrize("tokens", [1, 37, 90, 270])
@pytest.mark.parametrize("kind", ["mixed", "runs", "none"])
def test_each_token_gets_the_products_of_its_adapter(kind, tokens, rank, depth, parts, dtype):
    token_adapters = slots_of(kind, tokens)
    x = randn_on_device(0, tokens, depth + 8, dtype=dtype)[:, :depth]  # rows may be strided
    a = randn_on_device(1, SLOTS, len(parts) * rank, depth, dtype=dtype) / depth**0.5
    b = randn_on_device(2, SLOTS, 200, rank, dtype=dtype)
    y = randn_on_device(3, tokens, 200, dtype=dtype)
    before, expected = y.clone(), y.double()
    doubles = x.double(), a.double(), b.double()
    add_low_rank(LowRankOnHost(), token_adapters, *doubles, parts, expected)
    add_low_rank(LowRankGemm(), token_adapters, x, a, b, parts, y)
    assert relative_error(y, expected.float()) < 4 * TOLERANCE[dtype]
    assert torch.equal(y[token_adapters == 0], before[token_adapters == 0])


def test_what_a_token_gets_does_not_depend_on_the_others():
    """Bit by bit on a GPU; the interpreter multiplies with NumPy, whose sums depend on the row."""
    x, y = randn_on_device(0, 270, 96), randn_on_device(3, 270, 64)
    a, b = randn_on_device(1, SLOTS, 8, 96), randn_on_device(2, SLOTS, 64, 8)
    token_adapters, whole = slots_of("mixed", 270), y.clone()
    add_low_rank(LowRankGemm(), token_adapters, x, a, b, (slice(0, 64),), whole)
    for token in (0, 17, 32, 269):
        alone = y[token : token + 1].clone()
        one = slice(token, token + 1)
        add_low_rank(LowRankGemm(), token_adapters[one], x[one], a, b, (slice(0, 64),), alone)
        assert relative_error(alone[0], whole[token]) <= (1e-6 if INTERPRETED else 0)

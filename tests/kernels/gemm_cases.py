"""Products of few rows in Triton: cases for interpreter and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.triton_cases import HALVES, INTERPRETED, TOLERANCE, randn, relative_error
from pipeinfer.kernels import gemm
from pipeinfer.kernels.activations import quantize_groups_reference
from pipeinfer.kernels.formats import quantize_rows
from pipeinfer.kernels.norm import rms_norm_reference
from pipeinfer.kernels.tile_configs import GemmConfig
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

"""Rounding to FP8, and products with weights in FP8 blocks and in 4 bits: interpreter and GPU."""

from __future__ import annotations

import pytest
import torch

from draws import seeded
from kernels.triton_cases import HALVES, INTERPRETED, TOLERANCE, randn, relative_error
from pipeinfer.kernels import activations, gemm, int4
from pipeinfer.kernels.formats import dequantize_int4, pack_int4, unpack_int4
from pipeinfer.kernels.norm import rms_norm, rms_norm_quantized, rms_norm_quantized_reference
from pipeinfer.kernels.tile_configs import Int4GemmConfig

DTYPES = [torch.float32, *HALVES]


@pytest.mark.parametrize("part", [0, 128])
def test_rows_are_rounded_by_their_largest(part):
    wide = randn(0, 5, 768) * 100
    wide[2, :384] = 0.0
    x = wide[:, :384]
    got, scale = activations.quantize_groups(x, part)
    expected, scales = activations.quantize_groups_reference(x, part)
    assert torch.equal(scale, scales) and got.dtype == torch.float8_e4m3fn
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert got[2].float().abs().max() == 0


def almost(got, expected):
    """Sums in another order move a scale by a place, and few values to their neighbour in e4m3."""
    (values, scale), (others, scales) = got, expected
    assert values.dtype == torch.float8_e4m3fn and torch.allclose(scale, scales, rtol=1e-5)
    steps = (place(values) - place(others)).abs()
    assert steps.max() <= 1 and steps.float().mean() < 0.01


def place(values):
    """Neighbours in e4m3 have neighbouring numbers; both zeros have 0."""
    magnitude = (values.view(torch.uint8) & 127).int()
    return torch.where(values.view(torch.uint8) < 128, magnitude, -magnitude)


@pytest.mark.parametrize("part", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_may_end_in_rounded_rows(dtype, part):
    merged = randn(1, 4, 1536, dtype=dtype)[:, :768]
    merged[1] = 0.0
    almost(
        activations.swiglu_quantize_groups(merged, part),
        activations.swiglu_quantize_groups_reference(merged, part),
    )


@pytest.mark.parametrize("part", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_may_end_in_rounded_rows(offset, dtype, part):
    x, weight = randn(2, 4, 768, dtype=dtype)[:, :384], randn(3, 384, dtype=dtype)
    residuals = [randn(4, 4, 384, dtype=dtype) for _ in range(2)]
    for more in ((None, None), residuals):
        got, expected = (
            norm(x, weight, 1e-6, residual, offset, part)
            for norm, residual in zip(
                (rms_norm_quantized, rms_norm_quantized_reference), more, strict=True
            )
        )
        almost(got, expected)
    assert relative_error(*residuals) < TOLERANCE[dtype]
    parts = randn(5, 3, 4, 384)
    got, expected = (
        norm(parts, weight, 1e-6, residual.clone(), offset, part)
        for norm, residual in zip(
            (rms_norm_quantized, rms_norm_quantized_reference), residuals, strict=True
        )
    )
    almost(got, expected)
    assert rms_norm_quantized(x[:0], weight, 1e-6)[0].shape == (0, 384)
    plain, expected = torch.empty_like(x), rms_norm(x, weight, 1e-6)
    kept, alone = (
        rms_norm_quantized(x, weight, 1e-6, unquantized_out=plain),
        rms_norm_quantized(x, weight, 1e-6),
    )
    assert torch.equal(plain, expected)
    assert torch.equal(kept[0].float(), alone[0].float()) and torch.equal(kept[1], alone[1])


@pytest.mark.parametrize("rows", [3, 65, 140])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_and_weights_in_blocks_of_fp8(rows, biased):
    x, x_scale = activations.quantize_groups_reference(randn(0, rows, 256), 128)
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
    assert torch.equal(int4.int4_dequantize(*values, dtype), plain_of(values, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "rows"), [(16, 1), (32, 3), (64, 1), (128, 5), (512, 19)])
@pytest.mark.parametrize("splits", [1, 4])
def test_few_rows_are_multiplied_with_weights_in_4_bits(splits, group, rows, dtype):
    wide, values = randn(5, rows, 1024, dtype=dtype), in_4_bits(group, dtype)
    x, bias = wide[:, :512], randn(6, 64)
    how = Int4GemmConfig(16, 64, 1 if splits == 4 else 2, splits, 4)
    got = int4.int4_small_m_gemm(x, *values, how, bias)
    assert got.shape == (splits, rows, 64) and got.dtype == torch.float32
    expected = torch.nn.functional.linear(x.float(), plain_of(values, dtype).float(), bias)
    assert relative_error(got.sum(0), expected) < 2 * TOLERANCE[dtype]
    arrived = torch.zeros(2, dtype=torch.int32, device=x.device)
    for _ in range(2):
        [whole] = int4.int4_small_m_gemm(x, *values, how, bias, arrived)
        assert torch.equal(whole, in_order(got).to(dtype)) and not arrived.any()


def in_order(parts):
    whole = torch.zeros_like(parts[0])
    for part in parts:
        whole += part
    return whole

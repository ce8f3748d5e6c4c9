"""RMSNorm, SwiGLU and GeGLU in Triton: cases for interpreter and GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.triton_cases import TOLERANCE, randn, relative_error
from pipeinfer.kernels.activations import geglu, geglu_reference, swiglu, swiglu_reference
from pipeinfer.kernels.norm import rms_norm, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 1000, 5120])
def test_norm_is_that_of_the_reference(size, dtype):
    x, weight = randn(0, 4, size, dtype=dtype) * 3, randn(1, size, dtype=dtype)
    for offset in (0.0, 1.0):
        got = rms_norm(x, weight, 1e-6, offset=offset)
        expected = rms_norm_reference(x, weight, 1e-6, offset=offset)
        assert relative_error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_sum_goes_into_the_residual_and_its_norm_comes_back(offset, dtype):
    x, weight = randn(0, 5, 300, dtype=dtype), randn(1, 300, dtype=dtype)
    mine = randn(2, 5, 300, dtype=dtype)
    theirs = mine.clone()
    got = rms_norm(x, weight, 1e-5, mine, offset=offset)
    expected = rms_norm_reference(x, weight, 1e-5, theirs, offset)
    assert relative_error(mine, theirs) < TOLERANCE[dtype]
    # A sum that is rounded another way moves the norm by a place as well.
    assert relative_error(got, expected) < 2 * TOLERANCE[dtype]


def test_norm_may_overwrite_its_input_and_read_strided_rows():
    wide, weight = randn(0, 4, 200), randn(1, 100)
    expected = rms_norm_reference(wide[:, :100], weight, 1e-6)
    assert relative_error(rms_norm(wide[:, :100], weight, 1e-6), expected) < 1e-6
    x = wide[:, :100].contiguous()
    assert rms_norm(x, weight, 1e-6, out=x) is x
    assert relative_error(x, expected) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [24, 3000])
@pytest.mark.parametrize(
    ("kernel", "reference"), [(swiglu, swiglu_reference), (geglu, geglu_reference)]
)
def test_gated_activations_are_those_of_the_references(kernel, reference, size, dtype):
    merged = randn(0, 3, 2 * size, dtype=dtype) * 2
    assert relative_error(kernel(merged), reference(merged)) < TOLERANCE[dtype]
    wide = torch.cat((merged, merged), dim=1)[:, : 2 * size]
    assert torch.equal(kernel(wide), kernel(merged))


def test_no_tokens_are_no_work():
    assert rms_norm(randn(0, 0, 8), randn(1, 8), 1e-6).shape == (0, 8)
    assert swiglu(randn(0, 0, 8)).shape == geglu(randn(0, 0, 8)).shape == (0, 4)

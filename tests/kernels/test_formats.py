"""The turn of heads: what its matrix says, there and back, and the same for a token anywhere.
Numbers of e4m3: the nearest, and by the best scale.
"""

from __future__ import annotations

import pytest
import torch

from hadamard_matrix import matrix
from pipeinfer.kernels.formats import (
    E4M3,
    E4M3_MAX,
    SCALE_CANDIDATES,
    hadamard_half_block,
    hadamard_transform,
    quantize_rows,
    quantize_rows_min_error,
    round_to_e4m3,
)


@pytest.mark.parametrize(
    ("dim", "run"), [(2, 1), (64, 32), (80, 8), (96, 16), (128, 64), (256, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_is_turned_as_the_matrix_says_and_twice_gives_it_back(dim, run, dtype):
    assert hadamard_half_block(dim) == run
    heads = torch.randn(5, 3, dim, generator=torch.manual_seed(dim)).to(dtype)
    found, turn = hadamard_transform(heads), matrix(dim)
    assert found.dtype == torch.float32
    torch.testing.assert_close(turn @ turn, torch.eye(dim, dtype=torch.float64))
    torch.testing.assert_close(found.double(), heads.double() @ turn, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard_transform(found), heads.float(), rtol=1e-5, atol=1e-5)


def test_what_is_large_in_one_place_is_spread_over_its_block():
    heads = torch.zeros(128)
    heads[7] = 8.0
    assert torch.equal(hadamard_transform(heads).abs(), torch.full((128,), 8 * 128**-0.5))


def test_a_tokens_bits_do_not_depend_on_the_others():
    heads = torch.randn(300, 4, 80, generator=torch.manual_seed(1))
    strided = torch.cat((heads, heads), dim=1)[:, 4:]
    assert torch.equal(hadamard_transform(strided), hadamard_transform(heads))
    for one in (0, 7, 299):
        assert torch.equal(
            hadamard_transform(heads[one : one + 1]), hadamard_transform(heads)[one : one + 1]
        )


def test_numbers_are_rounded_to_e4m3_as_torch_converts_them():
    """Of all orders of magnitude, those halfway between two numbers among them."""
    drawn = torch.arange(-(2**31), 2**31 - 1, 1999).to(torch.int32).view(torch.float32)
    numbers = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    numbers = numbers[numbers.isfinite()].sort().values
    for values in (drawn[drawn.abs() <= E4M3_MAX], numbers, (numbers[1:] + numbers[:-1]) / 2):
        assert torch.equal(round_to_e4m3(values), values.to(E4M3).float())


def test_rows_get_the_scale_of_the_least_error():
    values = torch.randn(40, 96, generator=torch.manual_seed(2))
    values[5] = 0.0
    found, scale = quantize_rows_min_error(values)
    _, first = quantize_rows(values)
    errors = []
    for step in range(SCALE_CANDIDATES):
        tried = first * 2 ** (step / SCALE_CANDIDATES)
        near = (values / tried).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).float() * tried
        errors.append((near - values).square().sum(1))
    torch.testing.assert_close(
        (found.float() * scale - values).square().sum(1), torch.stack(errors).amin(0)
    )

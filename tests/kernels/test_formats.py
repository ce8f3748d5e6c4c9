"""The turn of heads: what its matrix says, there and back, and the same for a token anywhere."""

from __future__ import annotations

import pytest
import torch

from hadamard_matrix import matrix
from pipeinfer.kernels.formats import hadamard_half_block, hadamard_transform


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

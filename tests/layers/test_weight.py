"""A packed matrix gives what a plain one gives, for any number of rows, and its weight is final."""

from __future__ import annotations

import weakref

import pytest
import torch

from pipeinfer.layers.weight import UnquantizedWeight

ROWS = (0, 1, 2, 3, 8, 17, 64, 200)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 0.25), (torch.float16, 0.05)],
)
def test_packed_product_equals_the_plain_one(
    dtype: torch.dtype, tolerance: float, biased: bool
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(259, 96).to(dtype)
    bias = torch.randn(259).to(dtype) if biased else None
    matrix = UnquantizedWeight(weight.clone(), bias)
    matrix.pack()
    for rows in ROWS:
        x = torch.randn(rows, 192).to(dtype)[:, :96]  # strided, as the gated activation is
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(matrix(x), expected, rtol=0, atol=tolerance)


def test_weight_is_final_once_packed_and_its_memory_is_given_back() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this CPU has no packed form")
    weight = torch.randn(8, 8)
    alive = weakref.ref(weight)
    matrix = UnquantizedWeight(weight)
    del weight
    matrix.pack()
    assert alive() is None
    with pytest.raises(RuntimeError, match="final"):
        _ = matrix.weight
    matrix.pack()  # a second time is harmless


def test_matrix_that_cannot_be_packed_stays_plain() -> None:
    weight = torch.randn(8, 8, dtype=torch.float64)
    matrix = UnquantizedWeight(weight)
    matrix.pack()
    assert matrix.weight is weight
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(matrix(x), torch.nn.functional.linear(x, weight))

"""On a GPU a row of an exact GEMM, and a query of exact attention, are the same bits however the
work is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.exact_cases import Steps
from kernels.triton_cases import HALVES, TOLERANCE, randn, randn_on_device, relative_error
from pipeinfer.kernels.exact import exact_gemm
from pipeinfer.kernels.tile_configs import ExactGemmConfig

pytestmark = pytest.mark.gpu

TILES = [
    ExactGemmConfig(16, 16, 128, 2, 4, swap_ab=True),
    ExactGemmConfig(16, 64, 128, 4, 4, swap_ab=True),
    ExactGemmConfig(32, 32, 256, 4, 3, swap_ab=True),
    ExactGemmConfig(64, 64, 32, 4, 3),
    ExactGemmConfig(128, 128, 64, 8, 3),
    ExactGemmConfig(128, 256, 64, 8, 3),
]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("width", "depth"), [(1024, 3072), (200, 1000)])
def test_rows_of_an_exact_gemm_are_the_same_bits_by_every_tile_and_beside_any_rows(
    width, depth, dtype
):
    x, weight = (
        randn_on_device(0, 300, depth, dtype=dtype),
        randn_on_device(1, width, depth, dtype=dtype),
    )
    expected = exact_gemm(x, weight)
    for tile in TILES:
        assert torch.equal(exact_gemm(x, weight, config=tile), expected), tile
    for rows in (1, 2, 16, 17, 33, 64, 65, 130, 257):
        assert torch.equal(exact_gemm(x[-rows:], weight), expected[-rows:]), rows


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"),
    [(16, 8, 128, 64), (40, 8, 128, 64), (9, 3, 64, 16), (8, 4, 256, 64), (32, 4, 128, 1)],
)
@pytest.mark.parametrize("window", [None, 300])
def test_a_query_gets_the_same_bits_in_every_step(window, heads, kv_heads, dim, page, dtype):
    length = 1100
    steps, sinks = Steps(length, dtype, heads, kv_heads, dim, page), randn(5, heads)
    expected = steps.run([(0, length)], window, sinks)
    error = relative_error(expected, steps.expected([(0, length)], window, sinks))
    assert error < 4 * TOLERANCE[dtype]
    for bounds in ([0, 1, 64, 300, 1100], [0, 512, 1024, 1100], [0, 77, 256, 700, 1033, 1100]):
        chunks = list(pairwise(bounds))
        assert torch.equal(steps.run(chunks, window, sinks), expected)  # side by side
        alone = torch.cat([steps.run([chunk], window, sinks) for chunk in chunks])
        assert torch.equal(alone, expected)
    picked = [0, 1, 63, 64, 255, 256, 257, 600, 1023, 1024, 1099]
    for some in ([1099], [0, 255, 256], picked, picked * 9):  # one, few and many programs a row
        decodes = steps.run([(place, place + 1) for place in some], window, sinks)
        assert torch.equal(decodes, expected[some])

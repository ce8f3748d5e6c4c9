"""Norms do what their formulas say: alone, after an addition, with one plus the weight, by head."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.layers.elementwise import GEMMA_RMS_NORM, HeadNorm, RMSNorm
from pipeinfer.layers.placement import Placement, Shard

ALONE = Placement(Shard(), torch.float32, torch.device("cpu"))


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.double() ** 2).mean(-1, keepdim=True).add(eps).sqrt() * weight


def test_norm_follows_the_formula_and_leaves_its_input() -> None:
    norm = RMSNorm("n", 16, 1e-2, ALONE)
    norm.weight.normal_()
    x = torch.randn(5, 16)
    before = x.clone()
    torch.testing.assert_close(norm(x), rms(x, norm.weight, 1e-2).float())
    assert torch.equal(x, before)


def test_norm_after_addition_returns_the_sum_too() -> None:
    norm = RMSNorm("n", 16, 1e-5, ALONE)
    norm.weight.normal_()
    x, residual = torch.randn(5, 16), torch.randn(5, 16)
    total = x + residual
    normed, stream = norm.add_norm(x, residual)
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(normed, rms(total, norm.weight, 1e-5).float())
    stream.zero_()
    assert normed.abs().sum() > 0


def test_norm_of_small_half_precision_values_does_not_underflow() -> None:
    norm = RMSNorm("n", 64, 1e-12, Placement(Shard(), torch.float16, torch.device("cpu")))
    norm.weight.fill_(1)
    x = torch.full((1, 64), 2e-4, dtype=torch.float16)  # its square is zero in float16
    torch.testing.assert_close(norm(x), torch.ones_like(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_norm_takes_one_plus_the_weight_and_rounds_once(dtype: torch.dtype) -> None:
    norm = RMSNorm("n", 64, 1e-5, Placement(Shard(), dtype, torch.device("cpu")), GEMMA_RMS_NORM)
    norm.weight.normal_(0, 1e-3)  # lost if one were added to it in bfloat16
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    total = x + residual
    expected = rms(total.float(), 1 + norm.weight.float(), 1e-5).to(dtype)
    torch.testing.assert_close(norm(total), expected, rtol=1e-6, atol=1e-7)
    normed, stream = norm.add_norm(x, residual)
    assert torch.equal(stream, total)
    torch.testing.assert_close(normed, expected, rtol=1e-6, atol=1e-7)


def test_head_norm_gives_queries_and_keys_their_own_weights() -> None:
    norm = HeadNorm(4, 2, 8, 1e-6, ALONE)
    stored = {"q_norm.weight": torch.randn(8), "k_norm.weight": torch.randn(8)}
    for source in norm.sources(""):
        source.target.copy_(stored[source.name][source.slices])
    heads = torch.randn(3, 6, 8)
    expected = [
        rms(heads[:, :4], stored["q_norm.weight"], 1e-6),
        rms(heads[:, 4:], stored["k_norm.weight"], 1e-6),
    ]
    torch.testing.assert_close(norm(heads), torch.cat(expected, dim=1).float())

"""Choices of experts by softmax: cases for interpreter and GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.triton_cases import DEVICE, INTERPRETED, TOLERANCE, randn, relative_error
from pipeinfer.kernels.moe_routing import topk_softmax, topk_softmax_reference

SHAPES = [(1, 8, 2), (3, 128, 8), (9, 60, 4), (6, 5, 5), (2, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SHAPES)
def test_choices_and_weights_are_those_of_the_reference(tokens, experts, top_k, normalize, dtype):
    scores = (2 * randn(0, tokens, experts + 8)).to(dtype)[:, :experts]
    weights, chosen = topk_softmax(scores, top_k, normalize, dtype)
    expected, experts_expected = topk_softmax_reference(scores, top_k, normalize, dtype)
    assert torch.equal(chosen, experts_expected) and weights.dtype == dtype
    assert relative_error(weights, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scores_that_are_still_to_be_summed_are_rounded_as_a_product_is(dtype, splits):
    partials = (32 * randn(0, splits, 5, 24)).round() / 32  # their sums have one value in any order
    if dtype == torch.bfloat16 and INTERPRETED:
        partials = partials.round()  # it truncates
    weights, chosen = topk_softmax(partials, 4, True, dtype)
    expected, experts = topk_softmax_reference(partials, 4, True, dtype)
    assert torch.equal(chosen, experts)
    assert relative_error(weights, expected) < 2 * TOLERANCE[dtype]


def test_of_equal_scores_the_lower_expert_comes_first():
    scores = torch.zeros(2, 16, device=DEVICE)
    scores[0, [3, 5]] = -0.0
    scores[1, [2, 9, 12]] = 1.0
    _, chosen = topk_softmax(scores, 4, True, torch.float32)
    assert chosen.tolist() == [[0, 1, 2, 3], [2, 9, 12, 0]]


def test_scores_that_cannot_be_chosen_or_are_no_numbers():
    scores = randn(0, 4, 12)
    scores[0, :10] = float("-inf")
    scores[1, 4] = float("nan")
    scores[2, :] = float("-inf")
    scores[3, 7] = -float("nan")
    weights, chosen = topk_softmax(scores, 4, True, torch.float32)
    expected, experts = topk_softmax_reference(scores, 4, True, torch.float32)
    assert torch.equal(chosen[0], experts[0])
    torch.testing.assert_close(weights[0], expected[0])
    assert weights[1:].isnan().all()
    assert all(len(set(row)) == 4 and set(row) <= set(range(12)) for row in chosen.tolist())


def test_a_token_chooses_the_same_in_any_batch():
    scores = randn(0, 11, 32)
    weights, chosen = topk_softmax(scores, 4, True, torch.float32)
    alone, expert = topk_softmax(scores[6:7], 4, True, torch.float32)
    assert torch.equal(alone, weights[6:7]) and torch.equal(expert, chosen[6:7])
    assert topk_softmax(scores[:0], 4, True, torch.float32)[0].shape == (0, 4)

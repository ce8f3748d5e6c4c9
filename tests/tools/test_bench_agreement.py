"""What is counted of answers that rounding changes, and which scales are the best."""

from __future__ import annotations

import pytest
import torch

from bench import agreement
from bench.agreement import Chat


def test_there_are_200_different_chats():
    texts = agreement.CHATS.read_text().splitlines()
    assert len(texts) == len(set(texts)) == 200 and all(map(str.strip, texts))


def test_answers_are_compared_up_to_their_first_other_token():
    chats = [Chat([1], [5, 6, 7]), Chat([1], [5, 6]), Chat([1], [9]), Chat([2], [3, 4])]
    found = agreement._compared(chats, [[5, 6, 7], [5, 8], [9, 9], [0, 4]])
    assert found == {"answers": 4, "equal": 1, "first": (1 + 1 + 0) / 3, "tokens": 2 / 8}


def test_the_best_scales_are_those_with_the_least_error():
    """Far below one, e4m3 has few numbers left."""
    heads = torch.randn(1, 2, 50, 16, generator=torch.Generator().manual_seed(0))
    heads[:, 1] *= 1e-3
    by_head = agreement._best([heads], heads=True)
    by_layer = agreement._best([heads], heads=False)
    assert by_head[0].shape == (1, 2, 1, 1) and by_layer[0].numel() == 1

    def lost(part):
        return ((part(0, heads) - heads) / heads.std((2, 3), keepdim=True)).square().mean()

    plain = agreement._by(agreement._ones([heads]))
    assert lost(agreement._by(by_head)) < 2e-3 < lost(plain)
    assert lost(agreement._by_token) < 2e-3


def test_a_shift_and_a_turn_change_nothing_but_what_is_lost():
    heads = 5 + torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(1))
    exact = agreement._shifted(agreement._turned(lambda layer, x: x), [torch.full((2, 1, 16), 5.0)])
    torch.testing.assert_close(exact(0, heads), heads)
    rounded = agreement._by(agreement._ones([heads]))
    shifted = agreement._shifted(rounded, [torch.full((2, 1, 16), 5.0)])
    assert (shifted(0, heads) - heads).norm() < (rounded(0, heads) - heads).norm() / 3


@pytest.mark.parametrize("how", ["quantize_rows", "quantize_rows_min_error"])
def test_weights_are_rounded_by_row(how):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    near = agreement._decoded(getattr(agreement, how))(weight)
    assert 0 < (near - weight).norm() / weight.norm() < 0.04

"""The activations of gated feed-forward blocks do what their formulas say."""

from __future__ import annotations

import torch

from pipeinfer.layers.linear import gelu_and_mul, silu_and_mul


def test_gated_activation() -> None:
    x = torch.randn(3, 10)
    gate, up = x[:, :5].clone(), x[:, 5:].clone()
    torch.testing.assert_close(silu_and_mul(x), gate * gate.sigmoid() * up)


def test_gated_activation_by_tanh() -> None:
    x = torch.randn(3, 10)
    gate, up = x[:, :5], x[:, 5:]
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_and_mul(x), 0.5 * gate * (1 + inner.tanh()) * up)

"""A mixture of experts is what a loop over its tokens gives."""

from __future__ import annotations

import pytest
import torch

from pipeinfer.layers.experts import GatedExperts
from pipeinfer.layers.moe import SoftmaxRouter, SparseMoeBlock
from pipeinfer.layers.placement import Placement, Shard

ALONE = Placement(Shard(), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_experts_equal_a_loop_over_tokens(tokens: int, normalize: bool) -> None:
    torch.manual_seed(tokens)
    router = SoftmaxRouter(12, 6, 3, normalize, ALONE)
    experts = GatedExperts(12, 8, 6, ALONE)
    layer = SparseMoeBlock(router, experts, ALONE)
    for source in layer.sources("m."):
        source.target.normal_()
    x = torch.randn(tokens, 12)
    expected = []
    for vector in x:
        scores = (router.weight.weight @ vector).softmax(0)
        weights, chosen = scores.topk(3)
        weights = weights / weights.sum() if normalize else weights
        total = torch.zeros(12)
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (experts.gate_up.stacked[expert] @ vector).chunk(2)
            total += weight * (experts.down.stacked[expert] @ (gate * gate.sigmoid() * up))
        expected.append(total)
    torch.testing.assert_close(layer(x.clone()), torch.stack(expected), rtol=1e-4, atol=1e-4)

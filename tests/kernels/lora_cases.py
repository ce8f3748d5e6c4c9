"""Products of many low-rank adapters in one step: for interpreter and GPU."""

from __future__ import annotations

import pytest
import torch

from draws import seeded
from kernels.triton_cases import (
    DEVICE,
    HALVES,
    INTERPRETED,
    TOLERANCE,
    randn_on_device,
    relative_error,
)
from pipeinfer.kernels.lora import add_low_rank
from pipeinfer.layers.lora import add_low_rank_on_host

SLOTS = 3
PARTS = {
    "one module": (slice(0, 200),),
    "three modules": (slice(0, 130), slice(130, 162), slice(162, 200)),
    "four modules": (slice(0, 10), slice(10, 20), slice(20, 30), slice(30, 200)),
}


def slots_of(kind: str, tokens: int) -> torch.Tensor:
    """The adapter slot of each token."""
    if kind == "none":
        found = torch.zeros(tokens)
    elif kind == "runs":
        found = torch.arange(tokens) * (SLOTS + 1) // tokens
    else:
        found = torch.randint(0, SLOTS + 1, (tokens,), generator=seeded(0))
    return found.to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize(("rank", "depth"), [(4, 72), (16, 1100), (100, 256)])
@pytest.mark.parametrize("tokens", [1, 37, 90, 270])
@pytest.mark.parametrize("kind", ["mixed", "runs", "none"])
def test_each_token_gets_the_products_of_its_adapter(kind, tokens, rank, depth, parts, dtype):
    token_adapters = slots_of(kind, tokens)
    x = randn_on_device(0, tokens, depth + 8, dtype=dtype)[:, :depth]  # rows may be strided
    a = randn_on_device(1, SLOTS, len(parts) * rank, depth, dtype=dtype) / depth**0.5
    b = randn_on_device(2, SLOTS, 200, rank, dtype=dtype)
    y = randn_on_device(3, tokens, 200, dtype=dtype)
    before, expected = y.clone(), y.double()
    add_low_rank_on_host(x.double(), a.double(), b.double(), parts, token_adapters, expected)
    add_low_rank(x, a, b, parts, token_adapters, y)
    assert relative_error(y, expected.float()) < 4 * TOLERANCE[dtype]
    assert torch.equal(y[token_adapters == 0], before[token_adapters == 0])


def test_what_a_token_gets_does_not_depend_on_the_others():
    """Bit by bit on a GPU; the interpreter multiplies with NumPy, whose sums depend on the row."""
    x, y = randn_on_device(0, 270, 96), randn_on_device(3, 270, 64)
    a, b = randn_on_device(1, SLOTS, 8, 96), randn_on_device(2, SLOTS, 64, 8)
    token_adapters, whole = slots_of("mixed", 270), y.clone()
    add_low_rank(x, a, b, (slice(0, 64),), token_adapters, whole)
    for token in (0, 17, 32, 269):
        alone = y[token : token + 1].clone()
        one = slice(token, token + 1)
        add_low_rank(x[one], a, b, (slice(0, 64),), token_adapters[one], alone)
        assert relative_error(alone[0], whole[token]) <= (1e-6 if INTERPRETED else 0)

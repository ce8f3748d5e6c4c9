"""What the cases of all Triton kernels share: a device, random tensors, and how near is near.

The cases run twice: in Triton's interpreter (test_triton_interpreted.py starts a process for that)
and on a GPU (tests/gpu).
"""

from __future__ import annotations

import os

import torch

from draws import seeded

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from quick_interpreter import hurry

    hurry()
DEVICE = "cpu" if INTERPRETED else "cuda"
# Of operands of a product: the interpreter has none of bfloat16, it multiplies the bits.
HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed numbers, drawn on the CPU: the same on every device."""
    return torch.randn(*shape, generator=seeded(seed)).to(dtype).to(DEVICE)


def randn_on_device(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed numbers, drawn where they are needed: quick also for many megabytes."""
    return torch.randn(*shape, generator=seeded(seed, DEVICE), device=DEVICE).to(dtype)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.double(), expected.double()
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    return float((got - expected).norm() / expected.norm())


# Relative error of a whole tensor between two that are rounded once: they differ in few last places
# only. But the interpreter truncates to bfloat16 instead of rounding, by 2^-8 at the worst, and a
# kernel may do so twice.
TOLERANCE = {
    torch.float32: 1e-6,
    torch.bfloat16: 8e-3 if INTERPRETED else 1e-3,
    torch.float16: 2e-4,
}

"""Sums that are still to be made, over ranks or over splits of a product, and who makes them.

In a pre-norm transformer every such sum is added to the residual stream and normed. Where one
kernel does all of that, a layer hands on what it has. Knows no layer and no collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class SumNorm(Protocol):
    """A sum, residual addition and RMSNorm in one."""

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum that `partial` is for plus residual [T, size]; that sum)."""
        ...


class AllReduceFusion(SumNorm, Protocol):
    """With an all-reduce: `partial` is a filled buffer, and all ranks call in the same order.

    It takes all messages of a forward pass or none: afterwards, a rank's residual may be right in
    those rows alone that `add_norm` reads on that rank.
    """

    def buffer(self, rows: int, size: int) -> torch.Tensor | None:
        """[rows, size], not filled, for this rank's share of the next sum; None: not taken."""
        ...


@dataclass(frozen=True)
class PartialSum:
    """What `summing` makes a sum [T, size] of: this rank's share of one over ranks, [T, size], or
    all parts of one, [P, T, size]."""

    partial: torch.Tensor
    kernel: SumNorm

    @property
    def is_split_k(self) -> bool:
        """Whether nothing but its parts has to be added up."""
        return self.partial.dim() == 3

    def add_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of sum and residual [T, size], their sum, where the residual was)."""
        return self.kernel.add_norm(self.partial, residual, weight, eps)

"""Sums over ranks that are still to be made, and who makes them together with what comes next.

In a pre-norm transformer every sum over ranks is added to the residual stream and normed. Where
one kernel does all of that, a layer hands on its part alone. Knows no layer and no collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Fusion(Protocol):
    """All-reduce, residual addition and RMSNorm in one; all ranks call it in the same order.

    It takes all messages of a forward pass or none: afterwards, a rank's residual may be right in
    those rows alone that `add_norm` reads on that rank.
    """

    def buffer(self, rows: int, size: int) -> torch.Tensor | None:
        """[rows, size], not filled, for this rank's part of the next sum; None: not taken."""
        ...

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum of `partial`, a filled buffer, over ranks plus residual; that sum)."""
        ...


@dataclass(frozen=True)
class Pending:
    """This rank's part [T, size] of a sum, where `fusion` wants it."""

    partial: torch.Tensor
    fusion: Fusion

    def add_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of sum and residual [T, size], their sum, where the residual was)."""
        return self.fusion.add_norm(self.partial, residual, weight, eps)

"""What attention of one layer looks like: its heads and what they see.

Knows no backend, no pool and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one rank. sliding_window: tokens a query sees, itself included; None is all.

    sinks: [num_heads], each head's score of a key that every query sees and that has no value.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    soft_cap: float | None = None

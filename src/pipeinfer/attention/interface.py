"""What an attention backend is: a plan per step, a forward per layer.

Knows no model, no request and no policy; implementations are found through the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from pipeinfer.engine.step import Step
    from pipeinfer.memory.pool import KVPool


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one rank. sliding_window: tokens a query sees, itself included; None is all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None


class AttentionBackend(Protocol):
    """Stores K and V of a step's tokens into the pool and attends over the pages of each row."""

    page_sizes: tuple[int, ...] | None  # None: any
    preferred_page_size: int

    def plan(self, step: Step) -> Any:
        """Everything that all layers of `step` share: slots to write, index tensors, masks."""
        ...

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        """Writes k, v [T, kv_heads, head_dim]; attends with q [T, heads, head_dim]; q's shape."""
        ...

    def bind(self, pool: KVPool) -> None:
        """The pool that later plans and forwards read and write."""
        ...

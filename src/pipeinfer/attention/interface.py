"""What an attention backend is: a plan per step, a forward per layer.

Knows no model, no request and no policy; implementations are found through the registry.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from pipeinfer.memory.pool import KVPool
from pipeinfer.steps.step import Step


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

"""The gated feed-forward block: SwiGLU on merged gate and up projections.

Knows no experts and no model. Source: https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from pipeinfer.layers.fused import fused_ops
from pipeinfer.layers.linear import RowLinear, merged_gate_up
from pipeinfer.layers.pending import Pending
from pipeinfer.layers.placement import Placement, Source


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 n] as [T, n]; overwrites and returns the first half of its input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


class GatedMLP:
    """[T, hidden] to [T, hidden]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, placement: Placement
    ) -> None:
        self.gate_up = merged_gate_up(hidden_size, intermediate_size, bias, placement)
        self.down = RowLinear("down_proj", intermediate_size, hidden_size, bias, placement)
        fused = fused_ops(placement.device, placement.dtype, placement.compiled)
        self._skinny = None if bias else self.gate_up.skinny
        self._activate = silu_and_multiply if fused is None else fused.silu_and_multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor | Pending:
        return self.down(self._gated(x))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        if self._skinny is not None:
            gated = self._skinny.gated(x, self.gate_up.matrix.weight)
            if gated is not None:
                return gated
        return self._activate(self.gate_up(x))

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.gate_up.matrix.pack()
        self.down.matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this module, with its dot."""
        yield from self.gate_up.sources(prefix)
        yield from self.down.sources(prefix)

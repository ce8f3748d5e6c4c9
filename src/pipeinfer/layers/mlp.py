"""The gated feed-forward block: SwiGLU or GeGLU on merged gate and up projections.

Knows no experts and no model. Source: https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from pipeinfer.layers.fused import FusedOps, fused_ops
from pipeinfer.layers.linear import RowLinear, merged_gate_up
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, Source
from pipeinfer.layers.rounded import RowRounding, Rows

Multiply = Callable[[torch.Tensor], torch.Tensor]


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 n] as [T, n]; overwrites and returns the first half of its input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


def gelu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of [T, 2 n] as [T, n], GELU as approximated by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


@dataclass(frozen=True)
class Gate:
    """What is done with gate and up, [T, 2 n] to [T, n]. plain: by torch; fused: which of a
    device's kernels. in_products: whether weights have it built in, being SwiGLU.
    """

    plain: Multiply
    fused: Callable[[FusedOps], Multiply]
    in_products: bool

    def on(self, placement: Placement) -> Multiply:
        """The best that the device has."""
        ops = fused_ops(placement.device, placement.dtype, placement.compiled)
        return self.plain if ops is None else self.fused(ops)


GATES = {  # by the activation's name in a ModelConfig
    "silu": Gate(silu_and_multiply, lambda ops: ops.silu_and_multiply, True),
    "gelu_tanh": Gate(gelu_and_multiply, lambda ops: ops.gelu_and_multiply, False),
}


class GatedMLP:
    """[T, hidden] to [T, hidden]. merged: on disk, gate and up are one matrix."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        placement: Placement,
        gate: Gate,
        merged: bool = False,
    ) -> None:
        self.hidden_size = hidden_size
        self.gate_up = merged_gate_up(hidden_size, intermediate_size, bias, placement, merged)
        self.down = RowLinear("down_proj", intermediate_size, hidden_size, bias, placement)
        self._swiglu, self._fuses = gate.in_products, gate.in_products and not bias
        self._activate = gate.on(placement)

    @property
    def rounding(self) -> RowRounding | None:
        """See Weight (matrix.py)."""
        return self.gate_up.matrix.rounding

    def __call__(self, x: Rows) -> torch.Tensor | PartialSum:
        return self.down(self._gated(x))

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over ranks; of blocks without biases."""
        return self.down.share(self._gated(x))

    def _gated(self, x: Rows) -> Rows:
        if self._fuses:
            gated = self.gate_up.matrix.gated(x)
            if gated is not None:
                return gated
        rounding = self.down.matrix.rounding if self._swiglu else None
        activate = self._activate if rounding is None else rounding.gated
        return activate(self.gate_up(x))

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.gate_up.matrix.pack()
        self.down.matrix.pack()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of this module, with its dot."""
        yield from self.gate_up.sources(prefix)
        yield from self.down.sources(prefix)

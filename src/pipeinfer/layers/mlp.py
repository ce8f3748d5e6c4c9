"""The gated feed-forward block: SwiGLU or GeGLU on merged gate and up projections.

Knows no experts and no model. Source: https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from pipeinfer.layers.elementwise import FusedOps, fused_ops
from pipeinfer.layers.linear import RowParallelLinear, merged_gate_up
from pipeinfer.layers.placement import PartialSum, Placement, WeightSource
from pipeinfer.layers.weight import ActivationQuantizer, Activations

ActivationOp = Callable[[torch.Tensor], torch.Tensor]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 n] as [T, n]; overwrites and returns the first half of its input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate, inplace=True).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of [T, 2 n] as [T, n], GELU as approximated by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


@dataclass(frozen=True)
class GatedActivation:
    """The activation of a gated block: gate and up, [T, 2 n], to [T, n].

    Attributes:
        by_torch: operation by operation.
        fused: which of a device's fused kernels it is.
        in_gemm: whether weights have it built into their product (SwiGLU).
    """

    by_torch: ActivationOp
    fused: Callable[[FusedOps], ActivationOp]
    in_gemm: bool

    def on(self, placement: Placement) -> ActivationOp:
        """The fastest that the device has."""
        ops = fused_ops(placement.device, placement.dtype, placement.compiled)
        return self.by_torch if ops is None else self.fused(ops)


GATED_ACTIVATIONS = {  # by the activation's name in a ModelConfig
    "silu": GatedActivation(silu_and_mul, lambda ops: ops.silu_and_mul, True),
    "gelu_tanh": GatedActivation(gelu_and_mul, lambda ops: ops.gelu_and_mul, False),
}


class GatedMLP:
    """[T, hidden] to [T, hidden]. merged: on disk, gate and up are one matrix."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        placement: Placement,
        gate: GatedActivation,
        merged: bool = False,
    ) -> None:
        self.hidden_size = hidden_size
        self.gate_up = merged_gate_up(hidden_size, intermediate_size, bias, placement, merged)
        self.down = RowParallelLinear("down_proj", intermediate_size, hidden_size, bias, placement)
        self._swiglu, self._swiglu_in_gemm = gate.in_gemm, gate.in_gemm and not bias
        self._activate = gate.on(placement)

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """See Weight (weight.py)."""
        return self.gate_up.weight.input_quantizer

    def __call__(self, x: Activations) -> torch.Tensor | PartialSum:
        return self.down(self._activated(x))

    def unreduced(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sum over ranks; of blocks without biases."""
        return self.down.unreduced(self._activated(x))

    def _activated(self, x: Activations) -> Activations:
        if self._swiglu_in_gemm:
            gated = self.gate_up.weight.swiglu(x)
            if gated is not None:
                return gated
        quantizer = self.down.weight.input_quantizer if self._swiglu else None
        activate = self._activate if quantizer is None else quantizer.swiglu
        return activate(self.gate_up(x))

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.gate_up.weight.pack()
        self.down.weight.pack()

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this module, with its dot."""
        yield from self.gate_up.sources(prefix)
        yield from self.down.sources(prefix)

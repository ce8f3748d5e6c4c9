"""Which backends compute the experts of a mixture, and what each does with stacked matrices.

A backend gets the tokens, the router's weights and its choice, and gives each token's weighted sum.
On a GPU it never looks at the choice on the host, so that its work can stand in a CUDA graph. On a
CPU the experts compute one after the other (experts.py) and no backend is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeinfer.command_line import did_you_mean
from pipeinfer.kernels.formats import E4M3
from pipeinfer.layers.mlp import silu_and_mul
from pipeinfer.layers.weight import ActivationQuantizer, Activations
from pipeinfer.settings import ConfigurationError

if TYPE_CHECKING:
    from pipeinfer.kernels.moe import ClampedSwiglu
    from pipeinfer.kernels.moe_fp8 import Fp8Scaled
    from pipeinfer.layers.placement import Placement

FusedExperts = Callable[[Activations, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StackedExperts:
    """The experts that a rank has, stacked, as backends take them.

    A weight's scale is None where the weight is unquantized (see kernels/moe.py).

    Attributes:
        gate_up: weight [experts, 2 n, hidden], gate first, and its scale.
        down: weight [experts, hidden, n], and its scale.
        first: number of this rank's first expert.
        num_experts: on all ranks.
        bounded: biases and limits of experts that have them.
        input_quantizer: quantizes rows where both sides of the products are FP8.
    """

    gate_up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]
    first: int
    num_experts: int
    bounded: ClampedSwiglu | None = None
    input_quantizer: ActivationQuantizer | None = None

    @property
    def count(self) -> int:
        """Experts of this rank."""
        return len(self.gate_up[0])


class TritonExperts:
    """The project's own kernels, with SwiGLU and the router's weight fused into the products.
    Unquantized weights, FP8 by row or by block, MXFP4."""

    def __init__(self, stack: StackedExperts) -> None:
        self._stack = stack

    def summed(self, x: Activations, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], weights and experts [T, top_k] to the weighted sums [T, hidden]."""
        stack = self._stack
        if stack.input_quantizer is not None:
            from pipeinfer.kernels.moe import moe_sum

            by_pair = self._fp8_by_pair(stack.input_quantizer, x, weights, experts)
            first = stack.first if stack.count < stack.num_experts else None
            return moe_sum(by_pair, experts.contiguous(), first, stack.count)
        from pipeinfer.kernels.moe import fused_experts

        return fused_experts(*self._arguments(x, weights, experts))

    def unsummed(
        self, x: Activations, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """[top_k, T, hidden], of which `summed` are the sums; all experts are this rank's."""
        stack = self._stack
        if stack.input_quantizer is not None:
            by_pair = self._fp8_by_pair(stack.input_quantizer, x, weights, experts)
        else:
            from pipeinfer.kernels.moe import fused_experts_by_pair

            by_pair = fused_experts_by_pair(*self._arguments(x, weights, experts))
        return by_pair.transpose(0, 1)

    def _arguments(
        self, x: Activations, weights: torch.Tensor, experts: torch.Tensor
    ) -> tuple[Any, ...]:
        stack = self._stack
        (gate_up, gate_up_scale), (down, down_scale) = stack.gate_up, stack.down
        where = None, stack.first, stack.num_experts
        return x, gate_up, down, weights, experts, *where, gate_up_scale, down_scale, stack.bounded

    def _fp8_by_pair(
        self,
        quantizer: ActivationQuantizer,
        x: Activations,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        from pipeinfer.kernels.moe_fp8 import fused_experts_w8a8_by_pair

        stack, rows = self._stack, x if x.dtype == E4M3 else quantizer.quantize(x)
        taken, span = (rows.values, rows.scale), (stack.first, stack.num_experts)
        gate_up, down = cast("Fp8Scaled", stack.gate_up), cast("Fp8Scaled", stack.down)
        return fused_experts_w8a8_by_pair(taken, gate_up, down, weights, experts, span)


class TorchExperts:
    """torch's grouped matrix products (`torch.nn.functional.grouped_mm`), on rows ordered by
    expert. Unquantized weights in bfloat16; needs no Triton."""

    unsummed = None

    def __init__(self, stack: StackedExperts) -> None:
        dtype = stack.gate_up[0].dtype
        if stack.gate_up[1] is not None or stack.down[1] is not None:
            raise ConfigurationError(
                "--moe-backend torch multiplies plain weights, and those of this model stay "
                "quantized; --moe-backend triton works here"
            )
        if dtype != torch.bfloat16:
            raise ConfigurationError(
                f"--moe-backend torch computes in bfloat16 on a GPU, not in {dtype}; "
                "--moe-backend triton works here"
            )
        self._stack = stack

    def summed(self, x: Activations, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As TritonExperts' `summed`. Each token's sum is made in float32 and in the router's
        order, whatever other tokens there are."""
        stack, top_k = self._stack, experts.shape[1]
        pairs = experts.flatten() - stack.first  # pair i is token i // top_k
        elsewhere = (pairs < 0) | (pairs >= stack.count)
        pairs = torch.where(elsewhere, stack.count, pairs)  # behind those of this rank
        ordered, order = pairs.sort(stable=True)
        ends = torch.searchsorted(
            ordered, torch.arange(stack.count, device=ordered.device), right=True
        ).to(torch.int32)
        out = self._products(cast(torch.Tensor, x)[order // top_k], ordered, ends)
        by_pair = torch.zeros(len(pairs), out.shape[1], dtype=torch.float32, device=out.device)
        by_pair[order] = out.float()
        by_pair.masked_fill_(elsewhere[:, None], 0.0)  # grouped_mm leaves rows behind all groups
        return (by_pair.view(*experts.shape, -1) * weights[..., None]).sum(1).to(out.dtype)

    def _products(
        self, rows: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """rows [pairs, hidden] of `expert` [pairs], whose groups end at `ends` [experts]."""
        stack, grouped_mm = self._stack, torch.nn.functional.grouped_mm
        hidden = grouped_mm(rows, stack.gate_up[0].transpose(1, 2), offs=ends)
        bounded = stack.bounded
        if bounded is None:
            return grouped_mm(silu_and_mul(hidden), stack.down[0].transpose(1, 2), offs=ends)
        held = expert.clamp(max=stack.count - 1)  # of pairs elsewhere any: nobody reads their rows
        gate, up = (hidden + bounded.gate_up_bias[held]).chunk(2, dim=-1)
        gate = gate.clamp(max=bounded.limit)
        up = up.clamp(min=-bounded.limit, max=bounded.limit)
        activated = (up + 1.0) * gate * torch.sigmoid(gate * bounded.slope)
        out = grouped_mm(activated, stack.down[0].transpose(1, 2), offs=ends)
        return out if bounded.down_bias is None else out + bounded.down_bias[held]


BACKENDS: dict[str, type[TritonExperts | TorchExperts]] = {
    "triton": TritonExperts,
    "torch": TorchExperts,
}


def resolve_backend(name: str, device: str) -> str:
    """The backend that `name` means on `device` ("cpu", "cuda" or "meta"); "auto" is "triton" on a
    GPU, which was as fast or faster at all numbers of tokens that were measured.

    Raises ConfigurationError, which says what to use instead.
    """
    known = ["auto", "torch"] if device != "cuda" else ["auto", *BACKENDS]
    if name not in known:
        raise ConfigurationError(
            f"--moe-backend: no backend {name!r} for {device}; known: {', '.join(known)}"
            + did_you_mean(name, known)
        )
    if name != "auto":
        return name
    return "triton" if device == "cuda" else "torch"


def choose_backend(placement: Placement) -> type[TritonExperts | TorchExperts] | None:
    """What computes the experts of a layer that is placed so; None on a CPU."""
    return BACKENDS[placement.moe_backend] if placement.device.type == "cuda" else None

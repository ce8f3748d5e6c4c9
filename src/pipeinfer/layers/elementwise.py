"""Element-wise operations between products: norms and gated activations.

- `RMSNorm`, alone and after a residual addition, and `HeadNorm`, per head. Squares are averaged in
  float32 in every dtype (https://arxiv.org/abs/1910.07467).
- `GatedActivation`: SwiGLU and GeGLU.
- `fused_ops` chooses kernels for them, once, when a layer is built: sgl_kernel's, FlashInfer's or
  Triton's on a GPU; with --compile what torch.compile makes of torch's, on devices and in dtypes
  that have no fused kernels; None where torch computes them operation by operation.

Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch.nn import functional

from pipeinfer.layers.placement import HALF_DTYPES, PartialSum, Placement, WeightSource, full_slices
from pipeinfer.layers.weight import ActivationQuantizer, Activations, QuantizedActivations


@dataclass(frozen=True)
class NormOps:
    """RMSNorm by one kernel.

    Attributes:
    - norm: (x, weight, eps) to a new tensor
    - add_norm: (x, residual, weight, eps) to (norm of x + residual, x + residual), which may
      overwrite x and residual
    """

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_norm: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]
    ]


@dataclass(frozen=True)
class FusedOps:
    """The fused kernels of a device.

    Attributes:
    - norm: RMSNorm, times the weight
    - gemma_norm: RMSNorm, times one plus the weight, rounded once
    - silu_and_mul: [T, 2 n], gate first, to [T, n]
    - gelu_and_mul: [T, 2 n], gate first, to [T, n], with GELU as approximated by tanh
    """

    norm: NormOps
    gemma_norm: NormOps
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_and_mul: Callable[[torch.Tensor], torch.Tensor]


def fused_ops(
    device: torch.device, dtype: torch.dtype, compiled: bool = False, exact: bool = False
) -> FusedOps | None:
    """Returns the kernels of sgl_kernel or FlashInfer if they are installed and take `dtype`, else
    Triton's; None: torch computes operation by operation.

    - compiled: without such kernels, use torch.compile
    - exact: Triton's in any case, since bits must not depend on what is installed
    """
    if device.type == "cuda" and dtype in HALF_DTYPES:
        return _triton() if exact else _libraries()
    if compiled:
        return compiled_ops()
    return None


def _fused_ops_of(placement: Placement) -> FusedOps | None:
    return fused_ops(placement.device, placement.dtype, placement.compiled, placement.exact)


@lru_cache(maxsize=1)
def _libraries() -> FusedOps:
    for find in (_sgl_kernel, _flashinfer):
        try:
            return find()
        except ImportError:  # not installed, or built for other GPUs
            continue
    return _triton()


def _sgl_kernel() -> FusedOps:
    import sgl_kernel as library  # type: ignore

    return FusedOps(
        NormOps(library.rmsnorm, _in_place(library.fused_add_rmsnorm)),
        NormOps(library.gemma_rmsnorm, _in_place(library.gemma_fused_add_rmsnorm)),
        library.silu_and_mul,
        library.gelu_tanh_and_mul,
    )


def _flashinfer() -> FusedOps:
    from flashinfer import activation, norm  # type: ignore

    return FusedOps(
        NormOps(norm.rmsnorm, _in_place(norm.fused_add_rmsnorm)),
        NormOps(norm.gemma_rmsnorm, _in_place(norm.gemma_fused_add_rmsnorm)),
        activation.silu_and_mul,
        activation.gelu_tanh_and_mul,
    )


def _triton() -> FusedOps:
    from pipeinfer.kernels.elementwise import geglu, swiglu

    return FusedOps(_triton_norm(0.0), _triton_norm(1.0), swiglu, geglu)


def _triton_norm(offset: float) -> NormOps:
    from pipeinfer.kernels.elementwise import rms_norm

    def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rms_norm(x, weight, eps, residual, out=x, offset=offset)

    return NormOps(partial(rms_norm, offset=offset), _in_place(add))


def _in_place(
    add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], object],
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]:
    """`add` leaves the norm in its first argument and the sum in its second."""

    def both(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        add(x, residual, weight, eps)
        return x, residual

    return both


# Rows of the vectors that are compiled for: one row is compiled by itself, all others together.
WARM_UP_ROWS = (1, 2, 7, 64, 300)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = functional.rms_norm(x.to(torch.float32), (x.shape[-1],), None, eps)
    return wide.to(x.dtype) * weight


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return _rms_norm(total, weight, eps), total


def _gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = functional.rms_norm(x.to(torch.float32), (x.shape[-1],), None, eps)
    return (wide * (1.0 + weight.to(torch.float32))).to(x.dtype)


def _add_gemma_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return _gemma_rms_norm(total, weight, eps), total


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


@lru_cache(maxsize=1)
def compiled_ops() -> FusedOps:
    """Returns operations that are compiled when they are first called: see `warm_up_compiled`."""
    return FusedOps(
        _compiled_norm(_rms_norm, _add_rms_norm),
        _compiled_norm(_gemma_rms_norm, _add_gemma_rms_norm),
        torch.compile(_silu_and_mul, dynamic=True),
        torch.compile(_gelu_and_mul, dynamic=True),
    )


def _compiled_norm(
    norm: Callable[..., torch.Tensor], add: Callable[..., tuple[torch.Tensor, torch.Tensor]]
) -> NormOps:
    return NormOps(torch.compile(norm, dynamic=True), torch.compile(add, dynamic=True))


@torch.inference_mode()
def warm_up_compiled(
    norm: NormOps,
    multiply: Callable[[torch.Tensor], torch.Tensor],
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compiles the operations that a model calls: in half a minute, or seconds when torch finds its
    cache.

    - norm: for vectors [T, hidden]
    - multiply: the activation, for vectors [T, 2 * intermediate]
    - hidden: size of the residual stream
    - intermediate: this rank's share of the MLP's size
    - dtype: of the vectors
    - device: of the vectors

    Raises RuntimeError if there is no compiler, or it fails.
    """
    weight = torch.ones(hidden, dtype=dtype, device=device)
    for rows in WARM_UP_ROWS:
        x = torch.zeros(rows, hidden, dtype=dtype, device=device)
        norm.norm(x, weight, 1e-6)
        norm.add_norm(x, x.clone(), weight, 1e-6)
        multiply(torch.zeros(rows, 2 * intermediate, dtype=dtype, device=device))


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
    - by_torch: operation by operation
    - fused: which of a device's fused kernels it is
    - in_gemm: whether weights have it built into their product (SwiGLU)
    """

    by_torch: ActivationOp
    fused: Callable[[FusedOps], ActivationOp]
    in_gemm: bool

    def on(self, placement: Placement) -> ActivationOp:
        """The fastest that the device has."""
        ops = _fused_ops_of(placement)
        return self.by_torch if ops is None else self.fused(ops)


GATED_ACTIVATIONS = {  # by the activation's name in a ModelConfig
    "silu": GatedActivation(silu_and_mul, lambda ops: ops.silu_and_mul, True),
    "gelu_tanh": GatedActivation(gelu_and_mul, lambda ops: ops.gelu_and_mul, False),
}


def rms_normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x divided by the root of its mean square over the last dimension, in x's dtype."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, (x.shape[-1],), None, eps)
    if x.device.type == "cpu":
        # x and -x together have the mean 0 and the variance of x's mean square, so that LayerNorm,
        # one kernel that computes in float32, is RMSNorm, which torch computes in eight operations.
        both = torch.cat((x, x.neg()), -1)
        return functional.layer_norm(both, both.shape[-1:], None, None, eps)[..., : x.shape[-1]]
    wide = x.to(torch.float32)
    return functional.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x times its weight; rounded to x's dtype before and after that product."""
    return rms_normalize(x, eps) * weight


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x times one plus its weight; all in float32, rounded to x's dtype once.

    One plus a weight in bfloat16 would lose most of a small weight's bits.
    """
    factor = weight.to(torch.float32) + 1.0
    return rms_normalize(x.to(torch.float32), eps).mul_(factor).to(x.dtype)


@dataclass(frozen=True)
class NormKind:
    """How a norm applies its weight.

    Attributes:
    - by_torch: (x, weight, eps) to the norm, operation by operation
    - fused: selects the norm of a device's fused kernels
    - weight_offset: number that kernels with a norm as a part add to the weight
    """

    by_torch: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    fused: Callable[[FusedOps], NormOps]
    weight_offset: float


RMS_NORM = NormKind(rms_norm, lambda ops: ops.norm, 0.0)
GEMMA_RMS_NORM = NormKind(gemma_rms_norm, lambda ops: ops.gemma_norm, 1.0)


class RMSNorm:
    """Scales vectors [T, size] to a root mean square of one, times a weight."""

    def __init__(
        self, name: str, size: int, eps: float, placement: Placement, kind: NormKind = RMS_NORM
    ) -> None:
        self._name = name
        self._eps = eps
        self._by_torch = kind.by_torch
        self._offset = kind.weight_offset
        fused = _fused_ops_of(placement)
        self.fused = None if fused is None else kind.fused(fused)
        self.weight = placement.empty(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            return self.fused.norm(x, self.weight, self._eps)
        return self._by_torch(x, self.weight, self._eps)

    def add_norm(
        self,
        x: torch.Tensor | PartialSum | None,
        residual: torch.Tensor,
        input_quantizer: ActivationQuantizer | None = None,
    ) -> tuple[Activations, torch.Tensor]:
        """Returns (norm of x + residual, x + residual).

        - x: [T, size], which may be overwritten; a PartialSum, for RMS_NORM alone; None: zero
        - residual: [T, size], which may be overwritten
        - input_quantizer: of the weight that multiplies the norm
        """
        if input_quantizer is not None:
            parts, sums = (x.partial, x.is_split_k) if isinstance(x, PartialSum) else (x, True)
            if sums:
                return self._quantized(parts, residual, input_quantizer), residual
        if x is None:
            return self(residual), residual
        if isinstance(x, PartialSum):
            return x.add_norm(residual, self.weight, self._eps)
        if self.fused is not None:
            return self.fused.add_norm(x, residual, self.weight, self._eps)
        residual.add_(x)
        return self(residual), residual

    def _quantized(
        self, x: torch.Tensor | None, residual: torch.Tensor, input_quantizer: ActivationQuantizer
    ) -> QuantizedActivations:
        if x is None:
            return input_quantizer.norm(residual, self.weight, self._eps, None, self._offset)
        return input_quantizer.norm(x, self.weight, self._eps, residual, self._offset)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        shape = tuple(self.weight.shape)
        yield WeightSource(f"{prefix}{self._name}.weight", shape, full_slices(shape), self.weight)


class HeadNorm:
    """QK norm: each head [T, heads + kv_heads, head_dim] by itself, queries first.

    The two weights are laid out per head, so that queries and keys are one operation.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        placement: Placement,
        kind: NormKind = RMS_NORM,
    ) -> None:
        self.eps = eps
        self.weight_offset = kind.weight_offset
        self._by_torch = kind.by_torch
        self._num_heads = num_heads
        self.weight = placement.empty(num_heads + num_kv_heads, head_dim)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return self._by_torch(heads, self.weight, self.eps)

    @property
    def query_weight(self) -> torch.Tensor:
        """Weight [head_dim] of all query heads."""
        return self.weight[0]

    @property
    def key_weight(self) -> torch.Tensor:
        """Weight [head_dim] of all key heads."""
        return self.weight[-1]

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        shape = (self.weight.shape[1],)
        queries, keys = self.weight[: self._num_heads], self.weight[self._num_heads :]
        yield WeightSource(f"{prefix}q_norm.weight", shape, full_slices(shape), queries)
        yield WeightSource(f"{prefix}k_norm.weight", shape, full_slices(shape), keys)

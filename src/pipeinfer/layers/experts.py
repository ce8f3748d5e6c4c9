"""The experts of a mixture that one rank has: their weights, and the backend that computes them.

- GatedExperts: SwiGLU blocks, each stored by itself (PerExpertWeights).
- ClampedExperts: those of gpt-oss, all stored as one tensor (MergedExpertWeights).
- TritonExperts, TorchExperts, FlashInferExperts: backends. A backend gets the tokens, the router's
  weights and its choice, and gives each token's weighted sum. It is made once, of final weights. On
  a GPU it never looks at the choice on the host, so that its work can stand in a CUDA graph. On a
  CPU the experts compute one after the other, and no backend is used.

Knows no router.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from pipeinfer.checkpoint.quantization import Format, Mxfp4
from pipeinfer.command_line import did_you_mean
from pipeinfer.kernels.formats import E4M3, SCALE_BLOCK
from pipeinfer.layers.elementwise import silu_and_mul
from pipeinfer.layers.linear import empty_quantized, empty_stacked_fp8
from pipeinfer.layers.placement import (
    IN_TORCH,
    ParameterMemory,
    Placement,
    Shard,
    WeightSource,
)
from pipeinfer.layers.quantized import Mxfp4Tensor, small_m_gemm_8bit
from pipeinfer.layers.weight import (
    ActivationQuantizer,
    Activations,
    DequantizedWeight,
    QuantizedTensor,
    UnquantizedWeight,
    Weight,
)
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
    - gate_up: weight [experts, 2 n, hidden], and its scale; gate first, for a backend with
      `up_first` up first, as are the biases of `bounded`
    - down: weight [experts, hidden, n], and its scale
    - first: number of this rank's first expert
    - num_experts: on all ranks
    - bounded: biases and limits of experts that have them
    - input_quantizer: quantizes rows where both sides of the products are FP8
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
    Unquantized weights, FP8 by row or by block, MXFP4.

    Attributes:
    - up_first: the rows of up stand before those of gate
    """

    up_first = False

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
        """Returns [top_k, T, hidden], whose sums are the result of `summed`; all experts must be
        this rank's.
        """
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
    up_first = False

    def __init__(self, stack: StackedExperts) -> None:
        refuse("torch", _no_plain_bfloat16(stack))
        self._stack = stack

    def summed(self, x: Activations, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns each token's weighted sum, as TritonExperts.summed. Each token's sum is made in
        float32 and in the router's order, whatever other tokens there are.
        """
        stack, top_k = self._stack, experts.shape[1]
        pairs = experts.flatten() - stack.first  # pair i is token i // top_k
        elsewhere = (pairs < 0) | (pairs >= stack.count)
        pairs = torch.where(elsewhere, stack.count, pairs)  # after the pairs of this rank
        ordered, order = pairs.sort(stable=True)
        offsets = torch.searchsorted(
            ordered, torch.arange(stack.count, device=ordered.device), right=True
        ).to(torch.int32)
        out = self._products(cast(torch.Tensor, x)[order // top_k], ordered, offsets)
        by_pair = torch.zeros(len(pairs), out.shape[1], dtype=torch.float32, device=out.device)
        by_pair[order] = out.float()
        by_pair.masked_fill_(elsewhere[:, None], 0.0)  # grouped_mm leaves rows behind all groups
        return (by_pair.view(*experts.shape, -1) * weights[..., None]).sum(1).to(out.dtype)

    def _products(
        self, rows: torch.Tensor, expert: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """rows [pairs, hidden] of `expert` [pairs], whose groups end at `offsets` [experts]."""
        stack, grouped_mm = self._stack, torch.nn.functional.grouped_mm
        hidden = grouped_mm(rows, stack.gate_up[0].transpose(1, 2), offs=offsets)
        bounded = stack.bounded
        if bounded is None:
            return grouped_mm(silu_and_mul(hidden), stack.down[0].transpose(1, 2), offs=offsets)
        held = expert.clamp(
            max=stack.count - 1
        )  # pairs of other ranks take any: their rows are not read
        gate, up = (hidden + bounded.gate_up_bias[held]).chunk(2, dim=-1)
        gate = gate.clamp(max=bounded.limit)
        up = up.clamp(min=-bounded.limit, max=bounded.limit)
        activated = (up + 1.0) * gate * torch.sigmoid(gate * bounded.slope)
        out = grouped_mm(activated, stack.down[0].transpose(1, 2), offs=offsets)
        return out if bounded.down_bias is None else out + bounded.down_bias[held]


class FlashInferExperts:
    """FlashInfer's fused products of CUTLASS. Unquantized weights in bfloat16; needs the package
    flashinfer, which compiles its kernels where they were never used.

    The first call that is not captured times kernels and keeps the fastest for each number of
    tokens. Some of them add a token's experts up in an order that no two runs share.

    Attributes:
    - TUNED_TOKENS: the largest number of tokens that kernels are timed with; steps of more tokens
      are computed like those
    """

    unsummed = None
    up_first = True
    TUNED_TOKENS = 2048

    def __init__(self, stack: StackedExperts) -> None:
        refuse("flashinfer", _no_plain_bfloat16(stack) or _not_for_flashinfer(stack))
        self._stack = stack
        self._swiglu = {} if stack.bounded is None else _flashinfer_swiglu(stack, stack.bounded)
        self._tuned = False

    def summed(self, x: Activations, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns each token's weighted sum, as TritonExperts.summed."""
        rows = cast(torch.Tensor, x)
        if self._tuned or torch.cuda.is_current_stream_capturing():
            return self._run(rows, weights, experts)
        from flashinfer import autotune  # type: ignore

        self._tuned = True
        with autotune():  # layers of one shape are timed once
            return self._run(rows, weights, experts)

    def _run(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        from flashinfer.fused_moe import cutlass_fused_moe  # type: ignore

        stack, out = self._stack, torch.empty_like(x)
        cutlass_fused_moe(
            x.contiguous(),
            experts.to(torch.int32).contiguous(),
            weights.to(torch.float32).contiguous(),
            stack.gate_up[0],
            stack.down[0],
            x.dtype,
            quant_scales=[],
            ep_size=stack.num_experts // stack.count,
            ep_rank=stack.first // stack.count,
            output=out,
            tune_max_num_tokens=self.TUNED_TOKENS,
            **self._swiglu,
        )
        return out


def _flashinfer_swiglu(stack: StackedExperts, bounded: ClampedSwiglu) -> dict[str, torch.Tensor]:
    """FlashInfer's names for `bounded`: (up + beta) * gate * sigmoid(alpha * gate), both within
    limit."""
    weight, down_bias = stack.gate_up[0], bounded.down_bias
    if down_bias is None:  # the kernel takes both biases or none
        down_bias = weight.new_zeros(stack.count, weight.shape[2])
    numbers = {
        "swiglu_alpha": bounded.slope,
        "swiglu_beta": 1.0,
        "swiglu_limit": bounded.limit,
    }
    return {
        "fc1_expert_biases": bounded.gate_up_bias,
        "fc2_expert_biases": down_bias,
        **{
            name: torch.full((stack.count,), number, dtype=torch.float32, device=weight.device)
            for name, number in numbers.items()
        },
    }


def refuse(name: str, reason: str) -> None:
    """Raises ConfigurationError if there is a reason why backend `name` cannot compute."""
    if reason:
        raise ConfigurationError(f"--moe-backend {name}: {reason}; --moe-backend triton works here")


def _no_plain_bfloat16(stack: StackedExperts) -> str:
    """Why these weights are not unquantized ones in bfloat16, or ""."""
    if stack.gate_up[1] is not None or stack.down[1] is not None:
        return "it multiplies plain weights, and those of this model stay quantized"
    dtype = stack.gate_up[0].dtype
    return "" if dtype == torch.bfloat16 else f"it computes in bfloat16 on a GPU, not in {dtype}"


# Compute capabilities that FlashInfer has fused experts for.
FLASHINFER_CAPABILITIES = ((8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
FLASHINFER_ALIGNMENT = 8  # numbers in bfloat16 that it reads at once


def _not_for_flashinfer(stack: StackedExperts) -> str:
    """The reason why FlashInfer cannot multiply tensors of these shapes, or ""."""
    _, hidden, size = stack.down[0].shape
    for what, number in (("hidden size", hidden), ("share of an expert's size", size)):
        if number % FLASHINFER_ALIGNMENT:
            return f"this rank's {what} must be a multiple of {FLASHINFER_ALIGNMENT}, not {number}"
    if stack.num_experts % stack.count or stack.first % stack.count:
        counts = f"{stack.count} of {stack.num_experts}"
        return f"every rank must have as many experts, and this one has {counts}"
    return ""


MoEBackend = TritonExperts | TorchExperts | FlashInferExperts

BACKENDS: dict[str, type[MoEBackend]] = {
    "triton": TritonExperts,
    "torch": TorchExperts,
    "flashinfer": FlashInferExperts,
}


def resolve_backend(name: str, device: str) -> str:
    """Returns the backend that `name` means on `device` ("cpu", "cuda" or "meta"); "auto" is
    "triton" on a GPU, which was as fast or faster at all numbers of tokens that were measured.

    Raises ConfigurationError, with a name that can be used instead.
    """
    known = ["auto", "torch"] if device != "cuda" else ["auto", *BACKENDS]
    if name not in known:
        raise ConfigurationError(
            f"--moe-backend: no backend {name!r} for {device}; known: {', '.join(known)}"
            + did_you_mean(name, known)
        )
    if name == "flashinfer":
        refuse(name, _flashinfer_unsupported_reason())
    if name != "auto":
        return name
    return "triton" if device == "cuda" else "torch"


def _flashinfer_unsupported_reason() -> str:
    """Why FlashInfer has no fused experts on this host's GPU, or ""."""
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer is not installed (pip install pipeinfer[cuda])"
    capability = torch.cuda.get_device_capability()
    if capability in FLASHINFER_CAPABILITIES:
        return ""
    known = ", ".join(f"{major}.{minor}" for major, minor in FLASHINFER_CAPABILITIES)
    return "it is for GPUs of capability {}, this one has {}.{}".format(known, *capability)


def choose_backend(placement: Placement) -> type[MoEBackend] | None:
    """Returns the backend of the experts of a layer with this placement; None on a CPU."""
    return BACKENDS[placement.moe_backend] if placement.device.type == "cuda" else None


class PerExpertWeights:
    """A matrix for each expert of this rank, in one piece of memory; each is stored by itself.

    In FP8 they stay so where a device has kernels for it; from other formats they are dequantized
    once they are final.

    Attributes:
    - scale: float32, by row or by block, of weights that stay in e4m3 (kernels/moe.py); None: of
      others
    - weights: of each expert, by itself
    """

    def __init__(
        self, placement: Placement, names: Iterable[str], size: tuple[int, int, int]
    ) -> None:
        """Weights that are not filled yet.

        - names: modules within placement's that have the matrices; ConfigurationError unless all
          are stored alike
        - size: experts, out, in
        """
        form = placement.format(names)
        self._dtype = placement.dtype
        self._stacked: torch.Tensor | None = None
        self._quantized: list[QuantizedTensor] = []
        self.scale: torch.Tensor | None = None
        self.weights: Sequence[Weight]
        if form is None:
            self._stacked = placement.matrix(*size)
            self.weights = [UnquantizedWeight(weight) for weight in self._stacked]
            return
        fp8 = empty_stacked_fp8(form, size, placement)
        quantized = fp8
        if quantized is None:
            quantized = empty_quantized(form, size, placement.temporaries())
        if fp8 is not None:
            self._stacked, self.scale = fp8.weight, fp8.scale
        self._quantized = [quantized[index] for index in range(size[0])]
        self.weights = [DequantizedWeight(one, None, placement) for one in self._quantized]

    @property
    def stacked(self) -> torch.Tensor:
        """All matrices, [experts, out, in]; for weights that have to be dequantized, on a GPU, from
        `pack` on. RuntimeError if the matrices are not one tensor.
        """
        if self._stacked is None:
            raise RuntimeError("these matrices are not one tensor")
        return self._stacked

    def pack(self, memory: ParameterMemory = IN_TORCH, one_tensor: bool = False) -> None:
        """Packs the weights; to be called when they are final. one_tensor: all matrices must become
        one tensor; else each matrix is packed by itself, and only the packed matrices remain.
        """
        if not one_tensor:
            self._stacked, self._quantized = None, []
            for matrix in self.weights:
                matrix.pack(memory)
        elif self._stacked is None:
            each, dtype = self._quantized, self._dtype
            self._stacked = memory.packed(
                lambda: torch.stack([one.dequantized(dtype) for one in each])
            )
            self.weights = [UnquantizedWeight(weight) for weight in self._stacked]
            self._quantized = []


class MergedExpertWeights:
    """A matrix for each expert of this rank; all of them are one tensor on disk.

    Unquantized ones are stored as [in, out], those in MXFP4 as [out, in]; these stay in MXFP4 where
    a device has kernels for it.

    Attributes:
    - unquantized: [experts, out, in], final from `pack` on; None where they stay in MXFP4
    """

    def __init__(
        self,
        form: Format | None,
        size: tuple[int, int, int],
        placement: Placement,
        interleaved: bool = False,
    ) -> None:
        """Weights that are not filled yet.

        - form: None, unquantized, or MXFP4; ConfigurationError if it is another
        - size: experts, out, in
        - interleaved: rows of gate and up stand on disk in turn, and are deinterleaved in `pack`
        """
        if form not in (None, Mxfp4()):
            raise ConfigurationError(
                "experts with bounds are stored plain or in mxfp4, not in another number format"
            )
        kept = form is not None and not placement.dequantizes
        stays = kept and small_m_gemm_8bit(placement) is not None
        stored_in = placement if stays else placement.temporaries()
        self._stored = None if form is None else Mxfp4Tensor.empty(size, stored_in)
        self.unquantized = None if stays else placement.matrix(*size)
        self._interleaved = interleaved
        self._packed: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns (weight, scale) as kernels/moe.py takes them, from `pack` on; RuntimeError
        before.
        """
        if self._packed is None:
            raise RuntimeError("these matrices are not final yet")
        return self._packed

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called once, when they are final."""
        unquantized, stored, self._stored = self.unquantized, self._stored, None
        if self._interleaved and not memory.final:
            for part in (unquantized,) if stored is None else (stored.values, stored.exponents):
                if part is not None:
                    deinterleave(part)
        if unquantized is not None:
            if stored is not None and not memory.final:
                stored.dequantize_into(unquantized)
            self._packed = unquantized, None
        elif stored is not None:
            self._packed = stored.for_kernels

    def sources(
        self, name: str, shape: tuple[int, int, int], held: tuple[slice, slice, slice]
    ) -> Iterator[WeightSource]:
        """Yields the sources of the weights. held: this rank's experts, out and in of `shape`,
        which is that of all ranks.
        """
        if self._stored is not None:
            yield from self._stored.sources(name, shape, held)
        elif self.unquantized is not None:
            (count, out, deep), (matrices, rows, columns) = shape, held
            turned = self.unquantized.transpose(1, 2)
            yield WeightSource(name, (count, deep, out), (matrices, columns, rows), turned)


def deinterleave(stack: torch.Tensor) -> None:
    """Puts rows 0, 2, 4 ... of each matrix before its rows 1, 3, 5 ..., in place."""
    for rows in stack:
        rows.copy_(torch.cat((rows[::2], rows[1::2])))


def swap_halves(stack: torch.Tensor) -> None:
    """Puts the second half of the rows of each matrix before its first half, in place."""
    for rows in stack:
        rows.copy_(torch.cat(rows.chunk(2)[::-1]))


@dataclass(frozen=True)
class ExpertShard:
    """A rank's part of a mixture.

    Attributes:
    - first, last: its experts are first .. last - 1
    - start, stop: of each expert's intermediate size, it has start .. stop - 1
    - size: intermediate size of an expert
    """

    first: int
    last: int
    start: int
    stop: int
    size: int

    @property
    def count(self) -> int:
        """Experts of this rank."""
        return self.last - self.first

    @property
    def local_size(self) -> int:
        """Size of this rank's share of each expert's intermediate size."""
        return self.stop - self.start


def expert_shard(shard: Shard, num_experts: int, size: int) -> ExpertShard:
    """Returns this rank's part of `num_experts` experts of `size`: some whole experts, or a share
    of each.
    """
    first, last = shard.expert_span(num_experts)
    start, stop = (0, size) if shard.expert_parallel else shard.span(size)
    return ExpertShard(first, last, start, stop, size)


class LocalExperts(Protocol):
    """The experts of a mixture that this rank has.

    Attributes:
    - shard: the range of this rank's experts
    """

    shard: ExpertShard

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """Quantizer of the input of `fused` and `unsummed`, see Weight."""
        ...

    @property
    def fused(self) -> FusedExperts | None:
        """Each token's weighted sum, by fused kernels; None: there are none on this device."""
        ...

    @property
    def unsummed(self) -> FusedExperts | None:
        """Computes [top_k, T, hidden], whose sums are the result of `fused`; None if `fused` is
        None, or if this rank does not have all experts.
        """
        ...

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x [pairs, hidden], ordered by expert, `counts` of each, to outputs in the same order."""
        ...

    def pack(self, memory: ParameterMemory = IN_TORCH, /) -> None: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


def sequential_experts(
    x: torch.Tensor, counts: list[int], experts: list[Callable[[torch.Tensor], torch.Tensor]]
) -> torch.Tensor:
    """Returns the output of each expert's rows, computed one expert after the other."""
    parts = zip(x.split(counts), experts, strict=True)
    outputs = [expert(rows) for rows, expert in parts if rows.shape[0]]
    return torch.cat(outputs) if outputs else x


class _FusedByBackend(ABC):
    """Experts that are computed by the backend of mixtures, if the device has one.

    Attributes:
    - shard: this rank's experts
    - fused, unsummed: see LocalExperts; None before `pack`, too
    """

    shard: ExpertShard
    fused: FusedExperts | None = None
    unsummed: FusedExperts | None = None
    _backend: type[MoEBackend] | None
    _num_experts: int

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called once, when they are final. ConfigurationError if the
        backend cannot compute them.
        """
        self._pack_weights(memory)
        if self._backend is None:
            return
        stack = self._stacked()
        backend = self._backend(stack)
        if backend.up_first and not memory.final:
            swap_halves(stack.gate_up[0])
            if stack.bounded is not None:
                swap_halves(stack.bounded.gate_up_bias)
        self.fused = backend.summed
        if stack.count == stack.num_experts:
            self.unsummed = backend.unsummed

    @abstractmethod
    def _pack_weights(self, memory: ParameterMemory) -> None: ...

    @abstractmethod
    def _stacked(self) -> StackedExperts:
        """All experts of this rank, as the backend takes them; gate first."""


class GatedExperts(_FusedByBackend):
    """SwiGLU blocks without biases."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, num_experts: int, placement: Placement
    ) -> None:
        self.shard = expert_shard(placement.shard, num_experts, intermediate_size)
        self._hidden_size = hidden_size
        count, share = self.shard.count, self.shard.local_size
        each = [f"experts.{expert}" for expert in range(num_experts)]
        rows = [f"{expert}.{part}" for expert in each for part in ("gate_proj", "up_proj")]
        down = [f"{expert}.down_proj" for expert in each]
        self.gate_up = PerExpertWeights(placement, rows, (count, 2 * share, hidden_size))
        self.down = PerExpertWeights(placement, down, (count, hidden_size, share))
        self._num_experts = num_experts
        self._backend = choose_backend(placement)
        in_fp8 = self.gate_up.scale is not None and self.down.scale is not None
        whole = hidden_size % SCALE_BLOCK == 0 and share % SCALE_BLOCK == 0
        self.input_quantizer = (
            ActivationQuantizer(SCALE_BLOCK, keep_unquantized=True) if in_fp8 and whole else None
        )

    def _stacked(self) -> StackedExperts:
        gate_up, down = ((one.stacked, one.scale) for one in (self.gate_up, self.down))
        return StackedExperts(
            gate_up, down, self.shard.first, self._num_experts, input_quantizer=self.input_quantizer
        )

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return sequential_experts(
            x, counts, [self._expert(index) for index in range(self.shard.count)]
        )

    def _expert(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        gate_up, down = self.gate_up.weights[index], self.down.weights[index]
        return lambda rows: down(silu_and_mul(gate_up(rows)))

    def _pack_weights(self, memory: ParameterMemory) -> None:
        for one in (self.gate_up, self.down):
            one.pack(memory, one_tensor=self._backend is not None)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the mixture, with its dot. On disk each expert is by itself."""
        shard, hidden = self.shard, self._hidden_size
        part, every = slice(shard.start, shard.stop), slice(0, hidden)
        column, row = (shard.size, hidden), (hidden, shard.size)
        gate, up = slice(0, shard.local_size), slice(shard.local_size, 2 * shard.local_size)
        pairs = zip(self.gate_up.weights, self.down.weights, strict=True)
        for expert, (gate_up, down) in enumerate(pairs, shard.first):
            name = f"{prefix}experts.{expert}."
            yield from gate_up.sources(f"{name}gate_proj", gate, column, (part, every))
            yield from gate_up.sources(f"{name}up_proj", up, column, (part, every))
            yield from down.sources(f"{name}down_proj", every, row, (every, part))


class ClampedExperts(_FusedByBackend):
    """LocalExperts with biases: (up + 1) * gate * sigmoid(slope * gate), gate at most `limit`, up
    within it on both sides. Only unquantized weights can be computed without a backend.
    """

    input_quantizer = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        swiglu: tuple[float, float],
        placement: Placement,
    ) -> None:
        self._swiglu = swiglu
        self._num_experts = num_experts
        self._backend = choose_backend(placement)
        self.shard = expert_shard(placement.shard, num_experts, intermediate_size)
        count, share, form = self.shard.count, self.shard.local_size, placement.format(["experts"])
        self.gate_up = MergedExpertWeights(
            form, (count, 2 * share, hidden_size), placement, interleaved=True
        )
        self._gate_up_biases = placement.empty(count, 2 * share)
        self.down = MergedExpertWeights(form, (count, hidden_size, share), placement)
        self._down_biases = placement.empty(count, hidden_size)
        # Bias of an expert that is split over the ranks: one rank adds it to the sum.
        self._adds_down_bias = placement.shard.expert_parallel or placement.shard.rank == 0
        self._experts = self._unquantized_weights()

    def _unquantized_weights(self) -> list[tuple[UnquantizedWeight, UnquantizedWeight]]:
        """Gate and up, and down of each expert; none where they stay quantized."""
        rows, down = self.gate_up.unquantized, self.down.unquantized
        if rows is None or down is None:
            return []
        biases = self._down_biases if self._adds_down_bias else [None] * self.shard.count
        return [
            (UnquantizedWeight(one, row_bias), UnquantizedWeight(other, bias))
            for one, row_bias, other, bias in zip(
                rows, self._gate_up_biases, down, biases, strict=True
            )
        ]

    def _stacked(self) -> StackedExperts:
        from pipeinfer.kernels.moe import ClampedSwiglu

        bounded = ClampedSwiglu(
            *self._swiglu, self._gate_up_biases, self._down_biases if self._adds_down_bias else None
        )
        gate_up, down = self.gate_up.for_kernels, self.down.for_kernels
        return StackedExperts(gate_up, down, self.shard.first, self._num_experts, bounded)

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return sequential_experts(
            x, counts, [self._expert(*matrices) for matrices in self._experts]
        )

    def _expert(
        self, gate_up: UnquantizedWeight, down: UnquantizedWeight
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: down(self._activate(gate_up(rows)))

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        slope, limit = self._swiglu
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return up.add_(1.0).mul_(gate.mul(slope).sigmoid_().mul_(gate))

    def _pack_weights(self, memory: ParameterMemory) -> None:
        self.gate_up.pack(memory)
        self.down.pack(memory)
        if not memory.final:
            deinterleave(self._gate_up_biases)
        if self._backend is not None:
            return
        del self.gate_up, self.down
        for matrices in self._experts:
            for matrix in matrices:
                matrix.pack(memory)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the mixture, with its dot."""
        shard, hidden, of = self.shard, self._down_biases.shape[1], self._num_experts
        experts, every = slice(shard.first, shard.last), slice(0, hidden)
        wide, both = 2 * shard.size, slice(2 * shard.start, 2 * shard.stop)
        name, part = f"{prefix}experts.", slice(shard.start, shard.stop)
        at = experts, both
        yield WeightSource(f"{name}gate_up_proj_bias", (of, wide), at, self._gate_up_biases)
        at = experts, every
        yield WeightSource(f"{name}down_proj_bias", (of, hidden), at, self._down_biases)
        at = experts, both, every
        yield from self.gate_up.sources(f"{name}gate_up_proj", (of, wide, hidden), at)
        at = experts, every, part
        yield from self.down.sources(f"{name}down_proj", (of, hidden, shard.size), at)

"""The experts of a mixture that one rank has: which, what of each, and their weights and products.

`GatedExperts` are SwiGLU blocks, each stored by itself (`PerExpertWeights`); `ClampedExperts` are
those of gpt-oss, all stored as one tensor (`MergedExpertWeights`). Knows no router: rows come
ordered by expert. Sources: arxiv.org/abs/2101.03961, https://arxiv.org/abs/2508.10925.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.checkpoint.quantization import Format, Mxfp4
from pipeinfer.kernels.formats import SCALE_BLOCK
from pipeinfer.layers.linear import empty_quantized, empty_stacked_fp8
from pipeinfer.layers.mlp import silu_and_mul
from pipeinfer.layers.moe_backends import (
    FusedExperts,
    StackedExperts,
    TorchExperts,
    TritonExperts,
    choose_backend,
)
from pipeinfer.layers.placement import Placement, Shard, WeightSource
from pipeinfer.layers.quantized_float import Mxfp4Tensor, small_m_gemm_8bit
from pipeinfer.layers.weight import (
    ActivationQuantizer,
    DequantizedWeight,
    UnquantizedWeight,
    Weight,
)
from pipeinfer.settings import ConfigurationError


class PerExpertWeights:
    """A matrix for each expert of this rank, in one piece of memory; each is stored by itself.

    In FP8 they stay so where a device has kernels for it; from other formats they are dequantized
    once they are final.

    Attributes:
        scale: float32, by row or by block, of weights that stay in e4m3 (kernels/moe.py); None: of
            others.
        weights: of each expert, by itself.
    """

    def __init__(
        self, placement: Placement, names: Iterable[str], size: tuple[int, int, int]
    ) -> None:
        """names: of the modules within placement's that they are made of; ConfigurationError
        unless all are stored alike. size: experts, out, in."""
        form = placement.format(names)
        self._on_host = placement.device.type == "cpu"
        self._dtype = placement.dtype
        self._stacked: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.weights: Sequence[Weight]
        if form is None:
            self._stacked = placement.empty(*size)
            self.weights = [UnquantizedWeight(weight) for weight in self._stacked]
            return
        fp8 = empty_stacked_fp8(form, size, placement)
        quantized = empty_quantized(form, size, placement) if fp8 is None else fp8
        if fp8 is not None:
            self._stacked, self.scale = fp8.weight, fp8.scale
        self._quantized = [quantized[index] for index in range(size[0])]
        self.weights = [DequantizedWeight(one, None, placement) for one in self._quantized]

    @property
    def stacked(self) -> torch.Tensor:
        """[experts, out, in]; of weights that have to be dequantized, on a GPU, from `pack` on."""
        if self._stacked is None:
            raise RuntimeError("these matrices are not one tensor")
        return self._stacked

    def pack(self) -> None:
        """To be called when the weights are final. On the host each matrix is packed by itself."""
        if self._on_host:
            for matrix in self.weights:
                matrix.pack()
        elif self._stacked is None:
            self._stacked = torch.stack([one.dequantized(self._dtype) for one in self._quantized])
            self.weights = [UnquantizedWeight(weight) for weight in self._stacked]
            self._quantized = []


class MergedExpertWeights:
    """A matrix for each expert of this rank; all of them are one tensor on disk.

    Unquantized ones are stored as [in, out], those in MXFP4 as [out, in]; these stay in MXFP4 where
    a device has kernels for it.

    Attributes:
        unquantized: [experts, out, in], final from `pack` on; None where they stay in MXFP4.
    """

    def __init__(
        self,
        form: Format | None,
        size: tuple[int, int, int],
        placement: Placement,
        interleaved: bool = False,
    ) -> None:
        """form: None, unquantized, or MXFP4; ConfigurationError if it is another. size: experts,
        out, in. interleaved: rows of gate and up stand on disk in turn, and are deinterleaved in
        `pack`."""
        if form not in (None, Mxfp4()):
            raise ConfigurationError(
                "experts with bounds are stored plain or in mxfp4, not in another number format"
            )
        self._stored = None if form is None else Mxfp4Tensor.empty(size, placement)
        kept = form is not None and not placement.dequantizes
        stays = kept and small_m_gemm_8bit(placement) is not None
        self.unquantized = None if stays else placement.empty(*size)
        self._interleaved = interleaved
        self._packed: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight, scale) as kernels/moe.py takes them, from `pack` on; RuntimeError before."""
        if self._packed is None:
            raise RuntimeError("these matrices are not final yet")
        return self._packed

    def pack(self) -> None:
        """To be called once, when the weights are final."""
        unquantized, stored, self._stored = self.unquantized, self._stored, None
        if self._interleaved:
            for part in (unquantized,) if stored is None else (stored.values, stored.exponents):
                if part is not None:
                    deinterleave(part)
        if unquantized is not None:
            if stored is not None:
                stored.dequantize_into(unquantized)
            self._packed = unquantized, None
        elif stored is not None:
            self._packed = stored.padded_for_kernels()

    def sources(
        self, name: str, shape: tuple[int, int, int], held: tuple[slice, slice, slice]
    ) -> Iterator[WeightSource]:
        """`held`: this rank's experts, out and in of `shape`, which is that of all ranks."""
        if self._stored is not None:
            yield from self._stored.sources(name, shape, held)
        elif self.unquantized is not None:
            (count, out, deep), (matrices, rows, columns) = shape, held
            turned = self.unquantized.transpose(1, 2)
            yield WeightSource(name, (count, deep, out), (matrices, columns, rows), turned)


def deinterleave(stack: torch.Tensor) -> None:
    """In place, puts rows 0, 2, 4 ... of each matrix before its rows 1, 3, 5 ..."""
    for rows in stack:
        rows.copy_(torch.cat((rows[::2], rows[1::2])))


@dataclass(frozen=True)
class ExpertShard:
    """A rank's part of a mixture.

    Attributes:
        first, last: its experts are first .. last - 1.
        start, stop: of each expert's intermediate size, it has start .. stop - 1.
        size: intermediate size of an expert.
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
        """Of each expert's intermediate size, this rank's share."""
        return self.stop - self.start


def expert_shard(shard: Shard, num_experts: int, size: int) -> ExpertShard:
    """This rank's part of `num_experts` experts of `size`: some whole, or a share of each."""
    first, last = shard.expert_span(num_experts)
    start, stop = (0, size) if shard.expert_parallel else shard.span(size)
    return ExpertShard(first, last, start, stop, size)


class LocalExperts(Protocol):
    """The experts of a mixture that this rank has.

    Attributes:
        shard: which they are.
    """

    shard: ExpertShard

    @property
    def input_quantizer(self) -> ActivationQuantizer | None:
        """As a Weight's, for `fused` and `unsummed`."""
        ...

    @property
    def fused(self) -> FusedExperts | None:
        """Each token's weighted sum, by fused kernels; None: there are none on this device."""
        ...

    @property
    def unsummed(self) -> FusedExperts | None:
        """[top_k, T, hidden], what those are the sums of; None as `fused`, and if this rank has not
        all experts."""
        ...

    def __call__(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x [pairs, hidden], ordered by expert, `counts` of each, to outputs in the same order."""
        ...

    def pack(self) -> None: ...

    def sources(self, prefix: str) -> Iterator[WeightSource]: ...


def sequential_experts(
    x: torch.Tensor, counts: list[int], experts: list[Callable[[torch.Tensor], torch.Tensor]]
) -> torch.Tensor:
    """What LocalExperts give when they are called: each expert that got rows computes them."""
    parts = zip(x.split(counts), experts, strict=True)
    outputs = [expert(rows) for rows, expert in parts if rows.shape[0]]
    return torch.cat(outputs) if outputs else x


class _FusedByBackend(ABC):
    """What experts give to the backend of mixtures, if the device has one.

    Attributes:
        shard: this rank's experts.
    """

    shard: ExpertShard
    _backend: type[TritonExperts | TorchExperts] | None
    _num_experts: int

    @property
    def fused(self) -> FusedExperts | None:
        return None if self._backend is None else self._backend(self._stacked()).summed

    @property
    def unsummed(self) -> FusedExperts | None:
        if self._backend is None or self.shard.count < self._num_experts:
            return None
        return self._backend(self._stacked()).unsummed

    @abstractmethod
    def _stacked(self) -> StackedExperts:
        """All experts of this rank, as the backend takes them."""


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

    def pack(self) -> None:
        """To be called when the weights are final."""
        self.gate_up.pack()
        self.down.pack()

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
    within it on both sides. They can be called only where their weights are unquantized.
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
        # Of an expert that is split over the ranks, one rank adds the bias to the sum.
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

    def pack(self) -> None:
        """To be called once, when the weights are final."""
        self.gate_up.pack()
        self.down.pack()
        deinterleave(self._gate_up_biases)
        if self._backend is not None:
            return
        del self.gate_up, self.down
        for matrices in self._experts:
            for matrix in matrices:
                matrix.pack()

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

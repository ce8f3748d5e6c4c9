"""Placement of a layer: where its weights are, their sources, and sums that the following norm
makes.

In a pre-norm transformer every sum over ranks, or over the split-K parts of a product, is added to
the residual stream and normed. If one kernel does all of that, a layer hands on a `PartialSum`.
Knows no model and no file format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pipeinfer.checkpoint.quantization import Format, Quantization
from pipeinfer.layers.lora import AdapterBank

HALF_DTYPES = (torch.bfloat16, torch.float16)


class SumNorm(Protocol):
    """A kernel that makes a sum, adds the residual and norms."""

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of the sum of `partial` plus residual [T, size]; that sum)."""
        ...


class AllReduceFusion(SumNorm, Protocol):
    """A SumNorm whose sum is an all-reduce: `partial` is a filled `buffer`, and all ranks call in
    the same order.

    It takes all messages of a forward pass or none: afterwards, a rank's residual may be right in
    those rows alone that `add_norm` reads on that rank.
    """

    def buffer(self, rows: int, size: int) -> torch.Tensor | None:
        """Returns [rows, size], not filled, for this rank's share of the next sum; None: sums of
        that size are not supported.
        """
        ...


@dataclass(frozen=True)
class PartialSum:
    """A sum [T, size] that is still to be made.

    Attributes:
    - partial: this rank's share [T, size] of a sum over ranks, or split-K parts [P, T, size]
    - kernel: makes the sum, adds the residual and norms
    """

    partial: torch.Tensor
    kernel: SumNorm

    @property
    def is_split_k(self) -> bool:
        """Whether the sum is one of split-K parts, without an all-reduce."""
        return self.partial.dim() == 3

    def add_norm(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm of sum and residual [T, size], their sum, in the memory of the
        residual).
        """
        return self.kernel.add_norm(self.partial, residual, weight, eps)


# Standard deviation of dummy weights.
DUMMY_STD = 0.02


@dataclass(frozen=True)
class Shard:
    """A rank's share of a model.

    Attributes:
    - rank: 0 .. size - 1
    - size: tensor-parallel ranks
    - expert_parallel: each rank has some experts of a mixture whole, not a share of every one
    """

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False

    def span(self, total: int) -> tuple[int, int]:
        """Returns this rank's [start, stop) of `total` things; ValueError if they do not divide
        evenly.
        """
        if total % self.size:
            raise ValueError(f"{total} does not divide by {self.size} ranks")
        share = total // self.size
        return self.rank * share, (self.rank + 1) * share

    def expert_span(self, num_experts: int) -> tuple[int, int]:
        """Returns this rank's experts, [start, stop): as many as another's, or one more or less."""
        if not self.expert_parallel:
            return 0, num_experts
        return self.rank * num_experts // self.size, (self.rank + 1) * num_experts // self.size

    def kv_span(self, num_kv_heads: int) -> tuple[int, int]:
        """Returns this rank's KV heads, [start, stop); fewer heads than ranks are replicated."""
        if num_kv_heads >= self.size:
            return self.span(num_kv_heads)
        if self.size % num_kv_heads:
            raise ValueError(f"{self.size} ranks do not divide by {num_kv_heads} KV heads")
        head = self.rank * num_kv_heads // self.size
        return head, head + 1


class Collectives(Protocol):
    """Collectives over the ranks of a shard; all ranks call them in the same order."""

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, same shape; may reuse the input."""
        ...

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """Returns [..., n * size], [..., n] of every rank, concatenated in the order of ranks."""
        ...


class ParameterMemory(Protocol):
    """The memory of a model's parameters. A layer declares which of them stay and which are freed
    once it is packed; all else that a packed layer has follows from the parameters that stay.

    Attributes:
    - final: all that stays has its final values already, from the first model that was packed.
      Nothing is to be filled, and `pack` computes nothing from the values
    """

    @property
    def final(self) -> bool: ...

    def stays(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, /
    ) -> torch.Tensor:
        """A parameter, not yet filled."""
        ...

    def temporary(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, /
    ) -> torch.Tensor:
        """Allocates a parameter that is freed once its layer is packed, not yet filled. If the
        memory is final, the parameter takes no memory, and cannot be filled.
        """
        ...

    def packed(self, make: Callable[[], torch.Tensor], /) -> torch.Tensor:
        """Returns the tensor that `make` makes of final values; it stays, too. If the memory is
        final, `make` is not called.
        """
        ...


class TorchMemory:
    """A ParameterMemory of torch's own."""

    final = False

    def stays(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    temporary = stays

    def packed(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()


IN_TORCH = TorchMemory()


@dataclass(frozen=True)
class _Temporaries:
    """A ParameterMemory of temporaries: parameters of `memory` that are freed once their layer is
    packed.
    """

    memory: ParameterMemory

    @property
    def final(self) -> bool:
        return self.memory.final

    def stays(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.memory.temporary(shape, dtype, device)

    temporary = stays

    def packed(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.memory.packed(make)


def packs_matrices(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has a packed layout for matrices there."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


@dataclass(frozen=True)
class Placement:
    """The arguments that every layer is built with.

    Attributes:
    - shard: this rank's share
    - dtype: of parameters and activations
    - device: of parameters
    - collectives: over the ranks; None: the model runs only if there is one rank
    - compiled: element-wise operations by torch.compile if no kernel fuses them
    - all_reduce_fusion: makes the sums over ranks that go into the residual stream, if it supports
      their size; None: the sums are made at once
    - defers_sums: whether a layer may hand on a PartialSum
    - quantization: how matrices are stored on disk; None: in a dtype of their own
    - path: of the module on disk, with its dot
    - moe_backend: backend of mixtures of experts on a GPU (experts.py)
    - memory: of parameters
    - exact: the result of a token may not depend on the others of its step
    - adapters: memory for low-rank adapters of the linear layers (lora.py); None: the layers have
      none
    """

    shard: Shard
    dtype: torch.dtype
    device: torch.device
    collectives: Collectives | None = None
    compiled: bool = False
    all_reduce_fusion: AllReduceFusion | None = None
    defers_sums: bool = True
    quantization: Quantization | None = None
    path: str = ""
    moe_backend: str = "triton"
    memory: ParameterMemory = IN_TORCH
    exact: bool = False
    adapters: AdapterBank | None = None

    def without_adapters(self) -> Placement:
        """Returns the placement for layers that adapters do not change."""
        return replace(self, adapters=None)

    def without_deferred_sums(self) -> Placement:
        """Returns the placement for layers whose sums must be made before they are added to the
        residual stream.
        """
        return replace(self, all_reduce_fusion=None, defers_sums=False)

    def submodule(self, name: str) -> Placement:
        """Returns the placement of the module `name`, with its dot, within this one."""
        return replace(self, path=f"{self.path}{name}")

    def format(self, names: Iterable[str]) -> Format | None:
        """The number format of the modules `names` within this one, which are one matrix here;
        None: unquantized."""
        if self.quantization is None:
            return None
        return self.quantization.of(f"{self.path}{name}" for name in names)

    @property
    def dequantizes(self) -> bool:
        """Whether quantized weights are dequantized as they are loaded."""
        return self.quantization is None or self.quantization.dequantize_at_load

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A parameter that stays, not yet filled; by default in the model's dtype."""
        return self.memory.stays(shape, dtype or self.dtype, self.device)

    def matrix(self, *shape: int) -> torch.Tensor:
        """Allocates a matrix for UnquantizedWeight, whose `pack` may put another one in its
        place.
        """
        packs = packs_matrices(self.device, self.dtype)
        return (self.temporaries() if packs else self).empty(*shape)

    def temporaries(self) -> Placement:
        """Returns the placement of parameters that are freed once they are packed."""
        return replace(self, memory=_Temporaries(self.memory))

    @property
    def single_rank(self) -> bool:
        """Whether there is nothing to add up or gather."""
        return self.shard.size == 1

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum of `partial` over the ranks."""
        return partial if self.single_rank else self._collectives().all_reduce(partial)

    def reduce_deferred(self, partial: torch.Tensor) -> torch.Tensor | PartialSum:
        """Sum of `partial` [T, size] over the ranks, made by the norm that follows if that can."""
        buffer = (
            None
            if self.all_reduce_fusion is None
            else self.all_reduce_fusion.buffer(*partial.shape)
        )
        if self.all_reduce_fusion is None or buffer is None:
            return self.reduce(partial)
        return PartialSum(buffer.copy_(partial), self.all_reduce_fusion)

    def gather(self, partial: torch.Tensor) -> torch.Tensor:
        """`partial` of all ranks side by side in the last dimension."""
        return partial if self.single_rank else self._collectives().all_gather(partial)

    def _collectives(self) -> Collectives:
        if self.collectives is None:
            raise RuntimeError(
                f"rank {self.shard.rank} of {self.shard.size} cannot run without collectives"
            )
        return self.collectives


class CopyTarget(Protocol):
    """A tensor, or an object that values are copied to like to a tensor."""

    @property
    def device(self) -> torch.device: ...

    def copy_(self, values: torch.Tensor, /) -> object: ...

    def __getitem__(self, rows: slice, /) -> CopyTarget: ...


@dataclass(frozen=True)
class ConvertingTarget:
    """A CopyTarget that converts values on the way. A source must be copied at once.

    Attributes:
    - converted: tensor that is filled
    - convert: converts the values of the file to those of `converted`
    """

    converted: torch.Tensor
    convert: Callable[[torch.Tensor], torch.Tensor]

    @property
    def device(self) -> torch.device:
        return self.converted.device

    def copy_(self, values: torch.Tensor) -> None:
        self.converted.copy_(self.convert(values.to(self.converted.device)))

    def __getitem__(self, rows: slice) -> CopyTarget:
        raise TypeError("a converted source is read at once")


@dataclass(frozen=True)
class QuantizingTarget:
    """A CopyTarget that quantizes rows [n, columns] on the way.

    Attributes:
    - weight: [n, columns], quantized
    - scale: one or more for each row
    - quantize: from rows to (weight, scale)
    """

    weight: torch.Tensor
    scale: torch.Tensor
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def copy_(self, values: torch.Tensor) -> None:
        quantized, scale = self.quantize(values.to(self.device))
        self.weight.copy_(quantized)
        self.scale.copy_(scale)

    def __getitem__(self, rows: slice) -> QuantizingTarget:
        return QuantizingTarget(self.weight[rows], self.scale[rows], self.quantize)


@dataclass(frozen=True)
class WeightSource:
    """The part of a tensor of the checkpoint that fills a part of a parameter.

    Attributes:
    - name: of the tensor in the checkpoint
    - shape: of that tensor
    - slices: this rank's part of the tensor; if there are fewer dimensions than in the target, they
      are broadcast
    - target: a view into a parameter of this rank, or an object that converts values on the way
      there
    - stored_dtypes: the tensor's possible types on disk; None: any unquantized one
    - dummy: without a checkpoint, the standard deviation of values, or the value of a scale
    - blocks: the target gets a GGUF file's blocks of 4 bits in place of values (int4_blocks, gguf/)
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    target: CopyTarget
    stored_dtypes: tuple[str, ...] | None = None
    dummy: float = DUMMY_STD
    blocks: bool = False


def full_slices(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices that take all of a tensor of that shape."""
    return tuple(slice(0, size) for size in shape)

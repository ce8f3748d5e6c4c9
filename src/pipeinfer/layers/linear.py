"""Linear layers, and layers that consist of them alone.

- Layers split over ranks by output (column) or by input (row), merged where inputs agree.
- The token embedding and the LM head, split by vocabulary: each rank has an equal run of rows,
  padded with zeros on the last ranks if the vocabulary does not divide.
- `GatedMLP`, the gated feed-forward block: SwiGLU or GeGLU on merged gate and up projections
  (https://arxiv.org/abs/2002.05202).
- `create_weight`: the weight of a number format.

Weights are [out, in], as in the checkpoint; each rank allocates its own share only. Knows no
attention, no experts, no model, no tokenizer and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Format, Fp8, Int4, Int4Blocks, Int8, Mxfp4
from pipeinfer.layers.elementwise import GatedActivation
from pipeinfer.layers.lora import AdaptedLinear, AdaptedModule
from pipeinfer.layers.placement import (
    IN_TORCH,
    ParameterMemory,
    PartialSum,
    Placement,
    WeightSource,
)
from pipeinfer.layers.quantized import (
    Fp8Tensor,
    Int4BlocksTensor,
    Int4Tensor,
    Int8Tensor,
    fp8_gemm,
    int4_blocks_gemm,
    int4_gemm,
    int8_gemm,
    stacked_fp8,
)
from pipeinfer.layers.weight import (
    ActivationQuantizer,
    Activations,
    DequantizedWeight,
    QuantizedGemm,
    QuantizedTensor,
    QuantizedWeight,
    UnquantizedWeight,
    Weight,
    exact_gemm_for,
    small_m_gemm_for,
    unquantized,
)
from pipeinfer.settings import ConfigurationError


class StackedTensor(QuantizedTensor, Protocol):
    """A QuantizedTensor, or a stack of them."""

    def __getitem__(self, index: int, /) -> QuantizedTensor:
        """Returns one matrix of a stack."""
        ...


# By the class of a format: makes a tensor of a size, not yet filled.
EMPTY_TENSORS: Mapping[type, Callable[[tuple[int, ...], Any, Placement], StackedTensor]] = {
    Fp8: Fp8Tensor.empty,
    Int4: Int4Tensor.empty,
    Int4Blocks: Int4BlocksTensor.empty,
    Int8: Int8Tensor.empty,
}
# By the class of a format: the GEMM that a device has for matrices of a size; None without.
GEMMS: Mapping[type, Callable[[Any, tuple[int, int], Placement], QuantizedGemm[Any] | None]] = {
    Fp8: fp8_gemm,
    Int4: int4_gemm,
    Int4Blocks: int4_blocks_gemm,
    Int8: int8_gemm,
}
# By the class of a format: makes a stack whose kernels take it as it is stored; None without them.
STACKS_IN_FP8: Mapping[type, Callable[[Any, tuple[int, int, int], Placement], Fp8Tensor | None]] = {
    Fp8: stacked_fp8
}


def create_weight(
    placement: Placement,
    names: Iterable[str],
    size: tuple[int, int],
    bias: torch.Tensor | None,
    small_m: bool = False,
    split_k: bool = False,
) -> Weight:
    """The weight for a matrix in the number format that it is stored in, not yet filled.

    - placement: device, dtype and formats
    - names: modules within placement's, whose rows are the matrix's
    - size: [out, in]
    - bias: [out] or None
    - small_m: whether kernels for few rows may compute its products
    - split_k: whether a norm may add up its products of few rows

    Raises ConfigurationError if the size does not fit the format.
    """
    form = placement.format(names)
    if form is None or form == Mxfp4():  # which is for experts alone
        exact = exact_gemm_for(placement)
        if exact is not None:
            return UnquantizedWeight(placement.matrix(*size), bias, exact)
        gemm = small_m_gemm_for(placement.device, placement.dtype)
        return UnquantizedWeight(
            placement.matrix(*size), bias, gemm if small_m else None, gemm if split_k else None
        )
    if form == Int4Blocks() and int4_blocks_gemm(Int4Blocks(), size, placement) is None:
        form = Int8()  # rounded from the file's values
    gemm = None if placement.dequantizes else GEMMS[type(form)](form, size, placement)
    if gemm is None:
        tensor = empty_quantized(form, size, placement.temporaries())
        return DequantizedWeight(tensor, bias, placement)
    return QuantizedWeight(empty_quantized(form, size, placement), bias, gemm, split_k)


def empty_quantized(form: Format, size: tuple[int, ...], placement: Placement) -> StackedTensor:
    """A matrix of `size`, or a stack of them, not yet filled."""
    if form == Mxfp4():
        raise ConfigurationError("quantization_config: mxfp4 is for experts with bounds alone")
    return EMPTY_TENSORS[type(form)](size, form, placement)


def empty_stacked_fp8(
    form: Format, size: tuple[int, int, int], placement: Placement
) -> Fp8Tensor | None:
    """A stack of matrices that stays in FP8, not yet filled; None if they have to be dequantized:
    in this format, on this device or of this size."""
    make = None if placement.dequantizes else STACKS_IN_FP8.get(type(form))
    return None if make is None else make(form, size, placement)


@dataclass(frozen=True)
class ColumnShard:
    """This rank's rows of one of a column-parallel layer's matrices.

    Attributes:
    - name: of the matrix in the checkpoint
    - rows: of the matrix
    - start, stop: this rank has rows start .. stop - 1
    """

    name: str
    rows: int
    start: int
    stop: int


class ColumnParallelLinear:
    """Several matrices with one input as one weight: block by block, each with this rank's rows.

    [T, in] to [T, sum of the blocks' rows]; no collective.
    """

    def __init__(
        self, in_features: int, blocks: Sequence[ColumnShard], bias: bool, placement: Placement
    ) -> None:
        rows = sum(block.stop - block.start for block in blocks)
        self._blocks = tuple(blocks)
        self._in_features = in_features
        self.weight = create_weight(
            placement,
            [block.name for block in blocks],
            (rows, in_features),
            placement.empty(rows) if bias else None,
            small_m=True,
        )
        self.adapters = self._adapted(placement)

    def _adapted(self, placement: Placement) -> AdaptedLinear | None:
        if placement.adapters is None:
            return None
        modules: list[AdaptedModule] = []
        row, every = 0, slice(0, self._in_features)
        for block in self._blocks:
            at = slice(row, row + block.stop - block.start)
            name, shape = f"{placement.path}{block.name}", (block.rows, self._in_features)
            held = slice(block.start, block.stop)
            modules.append(AdaptedModule(name, shape, held, every, at))
            row = at.stop
        return placement.adapters.linear(modules)

    def __call__(self, x: Activations) -> torch.Tensor:
        product = self.weight(x)
        return with_adapters(self.adapters, product, x)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        bias, columns = self.weight.bias, self._in_features
        row = 0
        for block in self._blocks:
            rows = slice(row, row + block.stop - block.start)
            held = slice(block.start, block.stop)
            name = f"{prefix}{block.name}"
            shape, slices = (block.rows, columns), (held, slice(0, columns))
            yield from self.weight.sources(name, rows, shape, slices)
            if bias is not None:
                yield WeightSource(f"{name}.bias", (block.rows,), (held,), bias[rows])
            row = rows.stop


class RowParallelLinear:
    """A matrix split by its input: [T, in / ranks] to the sum over ranks [T, out].

    The sum, also that of one rank's product, may still be to be made, by the norm that follows.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, placement: Placement
    ) -> None:
        self._name = name
        self._placement = placement
        self._in_features = in_features
        self._out_features = out_features
        self._start, self._stop = placement.shard.span(in_features)
        self._bias = placement.empty(out_features) if bias else None
        self.weight = create_weight(
            placement,
            [name],
            (out_features, self._stop - self._start),
            # Over several ranks the bias counts once: it is added to the sum, not to each share.
            self._bias if placement.single_rank else None,
            split_k=placement.single_rank and placement.defers_sums,
        )
        self.adapters: AdaptedLinear | None = None
        if placement.adapters is not None:
            every, columns = slice(0, out_features), slice(self._start, self._stop)
            shape = out_features, in_features
            module = AdaptedModule(f"{placement.path}{name}", shape, every, columns, every)
            self.adapters = placement.adapters.linear([module])

    def __call__(self, x: Activations) -> torch.Tensor | PartialSum:
        adapted = is_adapted(self.adapters)
        later = None if adapted else self.weight.split_k(x)
        if later is not None:
            return later
        fusion = self._placement.all_reduce_fusion
        buffer = None if fusion is None else fusion.buffer(x.shape[0], self._out_features)
        if fusion is not None and buffer is not None:
            bias = None if self._placement.shard.rank else self._bias
            product = with_adapters(self.adapters, self.weight.into(buffer, x, bias), x)
            return PartialSum(product, fusion)
        total = self._placement.reduce(self.unreduced(x))
        return (
            total if self._bias is None or self._placement.single_rank else total.add_(self._bias)
        )

    def unreduced(self, x: Activations) -> torch.Tensor:
        """Returns this rank's share of the sum, for a caller that adds other shares first; only for
        layers without a bias.
        """
        return with_adapters(self.adapters, self.weight(x), x)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        rows, held = self._out_features, slice(self._start, self._stop)
        name, every = f"{prefix}{self._name}", slice(0, rows)
        shape = (rows, self._in_features)
        yield from self.weight.sources(name, every, shape, (every, held))
        if self._bias is not None:
            yield WeightSource(f"{name}.bias", (rows,), (slice(0, rows),), self._bias)


def with_adapters(
    adapters: AdaptedLinear | None, product: torch.Tensor, x: Activations
) -> torch.Tensor:
    """Returns the layer's product [T, out] with the products of adapters added."""
    return product if adapters is None else adapters.add(product, unquantized(x))


def is_adapted(adapters: AdaptedLinear | None) -> bool:
    """Whether some token of the step has an adapter: then no kernel may fuse the layer's product
    with the operation before or after it.
    """
    return adapters is not None and adapters.active


def merged_qkv(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: bool,
    placement: Placement,
) -> ColumnParallelLinear:
    """Returns the merged projection; its rows are this rank's query heads, then its key heads, then
    its value heads.
    """
    first, last = placement.shard.span(num_heads)
    kv_first, kv_last = placement.shard.kv_span(num_kv_heads)
    heads = [
        ("q_proj", num_heads, first, last),
        ("k_proj", num_kv_heads, kv_first, kv_last),
        ("v_proj", num_kv_heads, kv_first, kv_last),
    ]
    blocks = [
        ColumnShard(name, total * head_dim, start * head_dim, stop * head_dim)
        for name, total, start, stop in heads
    ]
    return ColumnParallelLinear(hidden_size, blocks, bias, placement)


def merged_gate_up(
    hidden_size: int,
    intermediate_size: int,
    bias: bool,
    placement: Placement,
    merged: bool = False,
) -> ColumnParallelLinear:
    """Returns the merged projection; its rows are this rank's share of the gate, then the same
    share of the up projection.

    - merged: gate and up are one matrix on disk, too
    """
    start, stop = placement.shard.span(intermediate_size)
    if merged:
        begins = (0, intermediate_size)
        blocks = [
            ColumnShard("gate_up_proj", 2 * intermediate_size, begin + start, begin + stop)
            for begin in begins
        ]
        return ColumnParallelLinear(hidden_size, blocks, bias, placement)
    blocks = [
        ColumnShard(name, intermediate_size, start, stop) for name in ("gate_proj", "up_proj")
    ]
    return ColumnParallelLinear(hidden_size, blocks, bias, placement)


# (rows int64 [T], counted from this rank's first) -> [T, hidden].
Lookup = Callable[[torch.Tensor], torch.Tensor]


class VocabParallelWeight:
    """This rank's rows of a [vocab, hidden] matrix: [ceil(vocab / ranks), hidden].

    Attributes:
    - weight: for products
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        placement: Placement,
        looked_up: bool = True,
    ) -> None:
        """Allocates this rank's rows. looked_up: whether `lookup` will be called."""
        shard = placement.shard
        share = -(-vocab_size // shard.size)
        self._name = name
        self.vocab_size = vocab_size
        self.start = min(shard.rank * share, vocab_size)
        self.stop = min(self.start + share, vocab_size)
        self._hidden = hidden_size
        size, used, form = (share, hidden_size), self.stop - self.start, Int8()
        how = placement.quantization
        stays = how is not None and how.format == form
        products = int8_gemm(form, size, placement) if stays else None
        self._values = None if products is None else Int8Tensor.empty(size, form, placement)
        if products is None or self._values is None:
            plain = placement.empty(*size) if looked_up else placement.matrix(*size)
            self._plain = UnquantizedWeight(plain, None, exact_gemm_for(placement))
            self.weight: Weight = self._plain
            parts = (plain,)
        else:
            self.weight = QuantizedWeight(self._values, None, products, split_k=False)
            parts = self._values.weight, self._values.scale
        for part in () if placement.memory.final else parts:
            part[used:].zero_()

    def lookup(self) -> Lookup:
        """Returns a function that looks rows up. If called before the matrix is packed, the layer
        keeps a plain copy.
        """
        if self._values is not None:
            return self._values.lookup
        return partial(functional.embedding, weight=self._plain.weight)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        held, shape = slice(0, self.stop - self.start), (self.vocab_size, self._hidden)
        slices = (slice(self.start, self.stop), slice(0, self._hidden))
        yield from self.weight.sources(f"{prefix}{self._name}", held, shape, slices)


class Embedding:
    """Ids int64 [T] to vectors [T, hidden], a new tensor; the sum over ranks."""

    def __init__(self, rows: VocabParallelWeight, placement: Placement) -> None:
        self.rows = rows
        self._lookup = rows.lookup()
        self._placement = placement

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.rows
        if self._placement.single_rank:
            return self._lookup(tokens)
        local = tokens - rows.start
        others = (local < 0) | (local >= rows.stop - rows.start)
        vectors = self._lookup(local.masked_fill(others, 0))
        return self._placement.reduce(vectors.masked_fill_(others[:, None], 0))


class ScaledEmbedding:
    """An Embedding times `scale`, which is rounded to the model's dtype first."""

    def __init__(self, rows: VocabParallelWeight, placement: Placement, scale: float) -> None:
        self.rows = rows
        self._plain = Embedding(rows, placement)
        self._scale = float(torch.tensor(scale, dtype=placement.dtype))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._plain(tokens).mul_(self._scale)


class LMHead:
    """Hidden states [L, hidden] to logits [L, vocab]; `rows` are the embedding's where tied.

    `local_logits` gives this rank's share only, [L, share], for ids `rows.start` and following.
    """

    def __init__(self, rows: VocabParallelWeight, placement: Placement) -> None:
        self.rows = rows
        self._placement = placement

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._placement.gather(self.local_logits(hidden))
        return logits[:, : self.rows.vocab_size]

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rows.weight(hidden)


class GatedMLP:
    """The gated feed-forward block: [T, hidden] to [T, hidden]. merged: gate and up are one matrix
    on disk.
    """

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
        """Quantizer of the input, see Weight (weight.py); None if adapters need the rows
        unquantized.
        """
        if is_adapted(self.gate_up.adapters):
            return None
        return self.gate_up.weight.input_quantizer

    def __call__(self, x: Activations) -> torch.Tensor | PartialSum:
        return self.down(self._activated(x))

    def unreduced(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of the sum over ranks; only for blocks without biases."""
        return self.down.unreduced(self._activated(x))

    def _activated(self, x: Activations) -> Activations:
        adapted = is_adapted(self.gate_up.adapters)
        if self._swiglu_in_gemm and not adapted:
            gated = self.gate_up.weight.swiglu(x)
            if gated is not None:
                return gated
        quantizer = self.down.weight.input_quantizer if self._swiglu and not adapted else None
        activate = self._activate if quantizer is None else quantizer.swiglu
        return activate(self.gate_up(x))

    def pack(self, memory: ParameterMemory = IN_TORCH) -> None:
        """Packs the weights; to be called when they are final."""
        self.gate_up.weight.pack(memory)
        self.down.weight.pack(memory)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of this module, with its dot."""
        yield from self.gate_up.sources(prefix)
        yield from self.down.sources(prefix)

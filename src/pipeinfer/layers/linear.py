"""Linear layers, split over ranks by output (column) or by input (row), merged where inputs agree.

Weights are [out, in], as in the checkpoint; each rank allocates its own share only. Knows no
attention, no model and no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pipeinfer.layers.formats import create_weight
from pipeinfer.layers.partial_sum import PartialSum
from pipeinfer.layers.placement import Placement, WeightSource
from pipeinfer.layers.rounded import Activations


@dataclass(frozen=True)
class ColumnShard:
    """Checkpoint matrix `name` of `rows` rows, of which this rank holds [start, stop)."""

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

    def __call__(self, x: Activations) -> torch.Tensor:
        return self.weight(x)

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

    def __call__(self, x: Activations) -> torch.Tensor | PartialSum:
        later = self.weight.split_k(x)
        if later is not None:
            return later
        fusion = self._placement.all_reduce_fusion
        buffer = None if fusion is None else fusion.buffer(x.shape[0], self._out_features)
        if fusion is not None and buffer is not None:
            bias = None if self._placement.shard.rank else self._bias
            return PartialSum(self.weight.into(buffer, x, bias), fusion)
        total = self._placement.reduce(self.weight(x))
        return (
            total if self._bias is None or self._placement.single_rank else total.add_(self._bias)
        )

    def unreduced(self, x: Activations) -> torch.Tensor:
        """What this rank adds to the sum, for who has more to add; of layers without a bias."""
        return self.weight(x)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        rows, held = self._out_features, slice(self._start, self._stop)
        name, every = f"{prefix}{self._name}", slice(0, rows)
        shape = (rows, self._in_features)
        yield from self.weight.sources(name, every, shape, (every, held))
        if self._bias is not None:
            yield WeightSource(f"{name}.bias", (rows,), (slice(0, rows),), self._bias)


def merged_qkv(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias: bool,
    placement: Placement,
) -> ColumnParallelLinear:
    """Rows: this rank's query heads, then its key heads, then its value heads."""
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
    """Rows: this rank's share of the gate, then the same share of the up projection.

    merged: on disk, too, they are one.
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

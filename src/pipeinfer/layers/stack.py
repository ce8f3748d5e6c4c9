"""Matrices of one size, one for each expert that a rank has, in one piece of memory.

In FP8 they stay so where a device has kernels for it; in other formats they become plain once they
are final. Knows no expert and no product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pipeinfer.layers.decoded import DequantizedWeight
from pipeinfer.layers.formats import empty_quantized, empty_stacked_fp8
from pipeinfer.layers.matrix import UnquantizedWeight, Weight
from pipeinfer.layers.placement import Placement


class PerExpertWeights:
    """`size`: matrices, out, in. `names`: of the modules within placement's that they are made of;
    ConfigurationError unless all are stored alike. scale: float32, by row or by block, of a weight
    that stays in e4m3; see kernels/moe.py.
    """

    def __init__(
        self, placement: Placement, names: Iterable[str], size: tuple[int, int, int]
    ) -> None:
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
        few = empty_stacked_fp8(form, size, placement)
        kept = empty_quantized(form, size, placement) if few is None else few
        if few is not None:
            self._stacked, self.scale = few.weight, few.scale
        self._quantized = [kept[index] for index in range(size[0])]
        self.weights = [DequantizedWeight(one, None, placement) for one in self._quantized]

    @property
    def stacked(self) -> torch.Tensor:
        """[matrices, out, in] on a GPU, from `pack` on, if it had to be decoded."""
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

"""Matrices of one size, one for each expert that a rank has, in one piece of memory.

In FP8 they stay so where a device has kernels for it; in other formats they become plain once they
are final. Knows no expert and no product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pipeinfer.layers.decoded import Decoded
from pipeinfer.layers.formats import eight_bits, values
from pipeinfer.layers.matrix import Matrix, Weight
from pipeinfer.layers.placement import Placement


class Stack:
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
        self._weight: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.matrices: Sequence[Weight]
        if form is None:
            self._weight = placement.empty(*size)
            self.matrices = [Matrix(weight) for weight in self._weight]
            return
        few = eight_bits(form, size, placement)
        kept = values(form, size, placement) if few is None else few
        if few is not None:
            self._weight, self.scale = few.weight, few.scale
        self._values = [kept[index] for index in range(size[0])]
        self.matrices = [Decoded(one, None, placement) for one in self._values]

    @property
    def weight(self) -> torch.Tensor:
        """[matrices, out, in] on a GPU, from `pack` on, if it had to be decoded."""
        if self._weight is None:
            raise RuntimeError("these matrices are not one tensor")
        return self._weight

    def pack(self) -> None:
        """To be called when the weights are final. On the host each matrix is packed by itself."""
        if self._on_host:
            for matrix in self.matrices:
                matrix.pack()
        elif self._weight is None:
            self._weight = torch.stack([one.decoded(self._dtype) for one in self._values])
            self.matrices = [Matrix(weight) for weight in self._weight]
            self._values = []

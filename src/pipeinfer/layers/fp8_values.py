"""What is kept of a matrix in FP8: e4m3 values and float32 scales, of rows or of blocks.

Knows no product. Source: https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pipeinfer.checkpoint.quantization import Fp8
from pipeinfer.kernels.formats import E4M3, quantize_rows_min_error
from pipeinfer.layers.placement import DUMMY_STD, Placement, Rounding, Source
from pipeinfer.settings import ConfigurationError

STORED = ("F8_E4M3",)
DUMMY_VALUES = 16.0  # standard deviation of those without a checkpoint
DUMMY_SCALE = DUMMY_STD / DUMMY_VALUES


@dataclass(frozen=True)
class Fp8Values:
    """Values (decoded.py). weight: e4m3 [rows, columns]; scale: float32 [rows, 1], or of blocks
    [rows / high, columns / wide], rounded up. Either may be a stack of such matrices.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    form: Fp8

    @classmethod
    def empty(cls, size: tuple[int, ...], form: Fp8, placement: Placement) -> Fp8Values:
        """Not yet filled; `size` ends with rows and columns."""
        *stack, rows, columns = size
        high, wide = form.block if form.scale_scope == "block" else (1, columns)
        scales = (*stack, -(-rows // high), -(-columns // wide))
        return cls(
            torch.empty(size, dtype=E4M3, device=placement.device),
            torch.empty(scales, dtype=torch.float32, device=placement.device),
            form,
        )

    def __getitem__(self, index: int) -> Fp8Values:
        """One of a stack."""
        return Fp8Values(self.weight[index], self.scale[index], self.form)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = self.weight.shape
        scale = self.scale
        if self.form.scale_scope == "block":
            high, wide = self.form.block
            scale = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return self.weight.float().mul_(scale).to(dtype)

    def permute(self, rows: torch.Tensor) -> None:
        """ConfigurationError if rows would leave their block."""
        if self.form.scale_scope == "block":
            high = self.form.block[0]
            if not torch.equal(rows // high, torch.arange(len(rows)) // high):
                raise ConfigurationError(
                    f"quantization_config: blocks of {high} rows do not fit heads whose RoPE is "
                    "interleaved"
                )
        else:
            self.scale[: len(rows)] = self.scale[rows]
        bits = self.weight.view(torch.uint8)  # there is no indexing of e4m3 everywhere
        bits[: len(rows)] = bits[rows]

    def sources(
        self, name: str, rows: slice, shape: tuple[int, int], slices: tuple[slice, slice]
    ) -> Iterator[Source]:
        """ConfigurationError if `slices` cut through a block."""
        weight, scale = f"{name}.weight", f"{name}.{self.form.scale}"
        if self.form.quantize_at_load:
            rounding = Rounding(self.weight[rows], self.scale[rows], quantize_rows_min_error)
            yield Source(weight, shape, slices, rounding)
            return
        yield Source(weight, shape, slices, self.weight[rows], STORED, dummy=DUMMY_VALUES)
        if self.form.scale_scope == "block":
            high, wide = self.form.block
            total = (-(-shape[0] // high), -(-shape[1] // wide))
            held = (
                _blocks(name, slices[0], shape[0], high),
                _blocks(name, slices[1], shape[1], wide),
            )
            target = self.scale[_blocks(name, rows, self.weight.shape[0], high)]
        elif self.form.scale_scope == "row":
            total, held, target = (shape[0], 1), (slices[0], slice(0, 1)), self.scale[rows]
        else:
            total, held, target = (1,), (slice(0, 1),), self.scale[rows]
        yield Source(scale, total, held, target, dummy=DUMMY_SCALE)


def _blocks(name: str, cut: slice, size: int, side: int) -> slice:
    """Which blocks of `side` the rows or columns `cut` of `size` are."""
    if cut.start % side or (cut.stop % side and cut.stop != size):
        raise ConfigurationError(
            f"{name}: {cut.start} to {cut.stop} of {size} are not whole blocks of {side}, which "
            "share a scale"
        )
    return slice(cut.start // side, -(-cut.stop // side))

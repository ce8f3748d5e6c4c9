"""Decodes parts of a GGUF file's tensors as float32, a few megabytes at a time.

Knows how rows lie in the file and which slice of them is wanted; no model and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeinfer.gguf.names import GgufTensor
from pipeinfer.gguf.quantization import BLOCKS, decode

PIECE = 1 << 20  # values that are decoded together; as float32 they fit into a CPU's cache


class WeightFile:
    """The weights of one file. Pages of it are mapped, and stay the kernel's."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")

    def pieces(
        self, packed: GgufTensor, slices: tuple[slice, ...]
    ) -> Iterator[tuple[slice, np.ndarray]]:
        """`slices` of a tensor of one or two dimensions: runs along the first dimension, counted
        from where these begin, with their values, float32."""
        columns, size = slices[-1], BLOCKS[packed.dtype][0]
        first, last = columns.start // size, -(-columns.stop // size)
        inner = slice(columns.start - first * size, columns.stop - first * size)
        if len(packed.shape) == 1:
            yield slice(0, columns.stop - columns.start), self._vector(packed)[columns]
            return
        blocks = self._blocks(packed)
        begin, end = slices[0].start, slices[0].stop
        step = max(PIECE // packed.shape[1], 1)
        for start in range(begin, end, step):
            stop = min(start + step, end)
            rows = blocks[_order(start, stop, packed)]
            values = decode(packed.dtype, rows[:, first:last].reshape(stop - start, -1))
            yield slice(start - begin, stop - begin), _plain(values[:, inner], packed)

    def _vector(self, packed: GgufTensor) -> np.ndarray:
        """A tensor of one dimension, whole: they are small."""
        values = decode(packed.dtype, self._blocks(packed).reshape(1, -1))[0]
        if packed.interleaved_heads:
            values = values[_order(0, len(values), packed)]
        return _plain(values, packed)

    def _blocks(self, packed: GgufTensor) -> np.ndarray:
        """uint8 [rows, blocks, bytes of a block], a view."""
        raw = self._bytes[packed.offset : packed.offset + packed.nbytes]
        return raw.reshape(
            packed.shape[0] if len(packed.shape) > 1 else 1, -1, BLOCKS[packed.dtype][1]
        )


def _plain(values: np.ndarray, packed: GgufTensor) -> np.ndarray:
    return values - np.float32(packed.norm_offset) if packed.norm_offset else values


def _order(start: int, stop: int, packed: GgufTensor) -> np.ndarray | slice:
    """Which rows of the file are rows start..stop of the tensor."""
    if not packed.interleaved_heads:
        return slice(start, stop)
    # A head's rows in the file: 0, half, 1, half + 1 ...; neighbours are rotated together.
    size = packed.shape[0] // packed.interleaved_heads
    rows = np.arange(start, stop)
    within = rows % size
    return rows - within + within % (size // 2) * 2 + within // (size // 2)

"""Where the arrays of a step lie in one int32 buffer, so that a single copy carries all of them.

Knows sizes and names; what the arrays mean to a kernel is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pipeinfer.engine.fields import FIELDS

# The regions of a step with R rows, T tokens, S sampling rows and P pages in its longest row:
#
#   | sample_positions 2S | write_slots 2S | last 2S |                      64-bit words
#   | the fields of engine/fields.py, S or 2S each |
#   | tokens T | token_slots T | positions T | store T |                    by token
#     or, where the device derives them and the indices:
#   | tokens T | starts R | counts R | slots R |
#   | lengths R | last_page R | q_indptr R+1 | prefill_indptr R+1 | kv_indptr R+1 |
#   | table R*P | indices ... |                                             the tail
#
# A region starts at a multiple of 16 bytes. What is uploaded ends with the last page index.

ALIGN = 4  # words


@dataclass(frozen=True)
class Sizes:
    """R, T, S and P; `indices`: how many page indices there is room for.

    derived: the device makes from the rows what is indexed by token or by page. table_rows: how
    many of the last rows stand in the table; None: all.
    """

    rows: int
    tokens: int
    samples: int
    pages: int
    indices: int
    derived: bool = False
    table_rows: int | None = None


@dataclass(frozen=True)
class Region:
    """`count` values of `dtype` from word `begin` on."""

    begin: int
    count: int
    dtype: Any


@dataclass(frozen=True)
class Limits:
    """The largest step: rows, tokens, and pages of one row."""

    rows: int
    tokens: int
    pages: int

    @property
    def sizes(self) -> Sizes:
        """Of any step: a graph has decode rows and prefill rows, as many as may be of each."""
        indices = self.rows * self.pages + self.rows
        return Sizes(
            2 * self.rows, self.tokens, self.rows, self.pages, indices, table_rows=self.rows
        )


class Layout:
    """Regions by name for given sizes. words: what the buffer must hold."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.regions: dict[str, Region] = {}
        rows, tokens, samples = sizes.rows, sizes.tokens, sizes.samples
        self.words = 0
        self._add(np.int64, samples, "sample_positions", "write_slots", "last")
        for field in FIELDS:
            self._add(field.dtype, samples, field.name)
        if sizes.derived:
            self._add(np.int32, tokens, "tokens")
            self._add(np.int32, rows, "starts", "counts", "slots")
        else:
            self._add(np.int32, tokens, "tokens", "token_slots", "positions", "store")
        self._add(np.int32, rows, "lengths", "last_page")
        self._add(np.int32, rows + 1, "q_indptr", "prefill_indptr", "kv_indptr")
        table_rows = rows if sizes.table_rows is None else sizes.table_rows
        self._add(np.int32, table_rows * sizes.pages, "table")
        self._add(np.int32, sizes.indices, "indices")

    def _add(self, dtype: Any, count: int, *names: str) -> None:
        for name in names:
            self.regions[name] = Region(self.words, count, dtype)
            words = count * np.dtype(dtype).itemsize // 4
            self.words += -(-words // ALIGN) * ALIGN

    def host(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """Views into `words` int32 [self.words or more], by name."""
        views = {}
        for name, region in self.regions.items():
            size = region.count * np.dtype(region.dtype).itemsize // 4
            views[name] = words[region.begin : region.begin + size].view(region.dtype)
        return views

    def tensors(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same views into a tensor of int32 words."""
        views = {}
        for name, region in self.regions.items():
            dtype = TORCH[np.dtype(region.dtype).name]
            size = region.count * dtype.itemsize // 4
            views[name] = words[region.begin : region.begin + size].view(dtype)
        return views

    @cached_property
    def indices_at(self) -> int:
        """The word where the tail's last region begins."""
        return self.regions["indices"].begin


# Torch has hardly anything for uint64: its bits are all that kernels want.
TORCH = {
    "int64": torch.int64, "uint64": torch.int64, "int32": torch.int32, "float32": torch.float32,
}  # fmt: skip

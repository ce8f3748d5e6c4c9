"""The KV pool: the keys and values of all requests, page by page.

Knows shapes and bytes only. The memory manager decides which request owns a page, an attention
backend reads pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
import torch

from pipeinfer.kernels.formats import E4M3, UNIT_KV_SCALES, KVScales
from pipeinfer.kernels.interface import lazy_zeros, tensor_of
from pipeinfer.step import AttentionShape

KeyCenter = (
    torch.Tensor | None
)  # float32 [kv_heads, head_dim]: what is subtracted from a layer's keys before they are stored


def bytes_per_page(shapes: Sequence[AttentionShape], page_size: int, dtype: torch.dtype, /) -> int:
    """Bytes of one page over all layers, K and V together."""
    elements = sum(shape.num_kv_heads * shape.head_dim for shape in shapes)
    return 2 * elements * page_size * dtype.itemsize


class KVPool:
    """K and V of each layer. Layers may differ in shape.

    k, v: of each layer, [num_pages, page_size, kv_heads, head_dim] in storage_dtype.
    num_pages: with the dummy page.
    page_size: tokens of a page.
    dtype: of keys and values.
    storage_dtype: of what is in the pages: dtype, or e4m3.
    scales: of each layer; 1 where storage_dtype is dtype.
    key_centers: of each layer, float32 [kv_heads, head_dim], what is subtracted from keys before
        they become e4m3; None where nothing is.
    shapes: of each layer.

    Page 0 is a dummy: no request owns it, padding reads it. Everything starts as zero, because
    padding is read before it is written: a masked position has weight 0, and 0 times a NaN of fresh
    memory would be NaN. Backends that read whole pages rely on that, too.
    """

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Sequence[KVScales] | None = None,
        key_centers: Sequence[KeyCenter] | None = None,
        memory: torch.Tensor | None = None,
    ) -> None:
        """scales: of each layer; None: pages store values as they are, and nothing is subtracted.
        memory: uint8 [num_pages * bytes_per_page] on `device`, which has the pages; None: they are
        made here.

        Raises ValueError without at least one page beside the dummy.
        """
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages of 1 token, not {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.storage_dtype = dtype if scales is None else E4M3
        self.device = torch.device(device)
        self.shapes = tuple(shapes)
        sizes = [
            (num_pages, page_size, shape.num_kv_heads, shape.head_dim) for shape in self.shapes
        ]
        self.scales = tuple(scales or [UNIT_KV_SCALES] * len(sizes))
        self.key_centers: tuple[KeyCenter, ...] = tuple(key_centers or [None] * len(sizes))
        parts = [size for size in sizes for _ in ("k", "v")]
        if memory is None:
            tensors = [lazy_zeros(size, self.storage_dtype, self.device) for size in parts]
        else:
            ends = np.cumsum([self._bytes_of(size) for size in parts])
            tensors = [
                memory[end - self._bytes_of(size) : end].view(self.storage_dtype).view(size)
                for size, end in zip(parts, ends.tolist(), strict=True)
            ]
        self.k, self.v = tensors[::2], tensors[1::2]

    def token_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of K and V of each layer, [num_pages * page_size, kv_heads * head_dim]: a row is a
        token's, so the slot mapping is an index. A gather of rows is six times faster than one by
        [page, offset].
        """
        k = [k.view(-1, k.shape[2] * k.shape[3]) for k in self.k]
        return k, [v.view(-1, v.shape[2] * v.shape[3]) for v in self.v]

    def _bytes_of(self, size: tuple[int, ...]) -> int:
        return prod(size) * self.storage_dtype.itemsize

    def byte_runs(self, pages: np.ndarray) -> Iterator[tuple[int, int]]:
        """(begin, end) of all bytes of `pages` int32 [n], ascending, within the memory that the
        pool was made with, in runs as long as they can be."""
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1) if len(pages) else []
        at = 0
        for part in (one for pair in zip(self.k, self.v, strict=True) for one in pair):
            page = self._bytes_of(part.shape[1:])
            for run in runs:
                yield at + int(run[0]) * page, at + (int(run[-1]) + 1) * page
            at += self._bytes_of(part.shape)

    def zero_pages(self, pages: np.ndarray) -> None:
        """Zeroes `pages` int32 [n], of a request that may have left NaN there.

        Their next owner fills them token by token, and FlashAttention-3 multiplies what is behind
        the end of a row, too (https://github.com/Dao-AILab/flash-attention/issues/2374).
        """
        at = tensor_of(pages.astype(np.int64)).to(self.device)
        for part in (*self.k, *self.v):
            by_page = part.view(torch.uint8).view(self.num_pages, -1)  # e4m3 cannot be filled
            if by_page.shape[1] % 8 == by_page.storage_offset() % 8 == 0:
                by_page = by_page.view(torch.int64)
            by_page.index_fill_(0, at, 0)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, K and V together."""
        return bytes_per_page(self.shapes, self.page_size, self.storage_dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool; on a CPU they become real memory only as tokens are stored."""
        return self.num_pages * self.bytes_per_page

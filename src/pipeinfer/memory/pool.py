"""The KV pool: where keys and values of all requests lie, page by page.

Knows shapes and bytes only: who owns a page is the memory manager's business, how pages are read
is the attention backend's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeinfer.kernels.formats import E4M3, UNIT_KV_SCALES, KVScales
from pipeinfer.step import AttentionShape
from pipeinfer.tensors import tensor_of

Shift = torch.Tensor | None  # float32 [kv_heads, head_dim]: what a layer's keys are stored less


def bytes_per_page(shapes: Sequence[AttentionShape], page_size: int, dtype: torch.dtype, /) -> int:
    """Bytes of one page over all layers, K and V together."""
    elements = sum(shape.num_kv_heads * shape.head_dim for shape in shapes)
    return 2 * elements * page_size * dtype.itemsize


class KVPool:
    """Per layer, K and V as `[pages, page_size, kv_heads, head_dim]`; layers may differ in shape.

    dtype: of the values; stored: of what lies in the pages, the same or e4m3. scales: of each
    layer, 1 where values are stored as they are. shifts: of each layer's keys before they become
    e4m3, None where nothing is subtracted.

    Page 0 is a dummy: no request owns it, padding reads it. Everything starts as zero, because
    padding is read before anybody has written: a masked position has weight 0, and 0 times a NaN
    that lay in fresh memory would be NaN. Backends that read whole pages rely on it too.
    """

    def __init__(
        self,
        shapes: Sequence[AttentionShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Sequence[KVScales] | None = None,
        shifts: Sequence[Shift] | None = None,
    ) -> None:
        """scales: of each layer, of values that are stored as e4m3; None: they are not, and there
        are no shifts either.

        Raises ValueError without at least one page beside the dummy.
        """
        if pages < 2 or page_size < 1:
            raise ValueError(f"a pool needs 2 pages of 1 token, not {pages} of {page_size}")
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.stored = dtype if scales is None else E4M3
        self.device = torch.device(device)
        self.shapes = tuple(shapes)
        sizes = [(pages, page_size, shape.num_kv_heads, shape.head_dim) for shape in self.shapes]
        self.scales = tuple(scales or [UNIT_KV_SCALES] * len(sizes))
        self.shifts: tuple[Shift, ...] = tuple(shifts or [None] * len(sizes))
        self.k = [_zeros(size, self.stored, self.device) for size in sizes]
        self.v = [_zeros(size, self.stored, self.device) for size in sizes]

    def by_place(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V of each layer as [pages * page_size, kv_heads * head_dim], one row per token: a
        flat gather is six times faster than one by [page, offset].
        """
        k = [k.view(-1, k.shape[2] * k.shape[3]) for k in self.k]
        return k, [v.view(-1, v.shape[2] * v.shape[3]) for v in self.v]

    def clear(self, pages: np.ndarray) -> None:
        """Zeroes `pages` int32 [n], of a request that may have left NaN there.

        Whoever gets such a page fills it token by token, and FlashAttention-3 multiplies what lies
        behind a row's end, too (https://github.com/Dao-AILab/flash-attention/issues/2374).
        """
        at = tensor_of(pages.astype(np.int64)).to(self.device)
        for part in (*self.k, *self.v):
            part.view(torch.uint8).index_fill_(0, at, 0)  # e4m3 cannot be filled

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, K and V together."""
        return bytes_per_page(self.shapes, self.page_size, self.stored)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool; on a CPU they become real memory only as tokens are stored."""
        return self.pages * self.bytes_per_page


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.zeros writes every byte (1.5 s for 1 GiB); NumPy takes zero pages from the kernel, which
    # become real memory only where a token is stored.
    raw = np.zeros(int(np.prod(size)) * dtype.itemsize, dtype=np.uint8)
    return tensor_of(raw).view(dtype).view(size)

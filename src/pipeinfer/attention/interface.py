"""The interface of attention backends on every device: the pool that a backend reads, metadata for
each step, a call for each layer. Also the backend that reads pages only, by one kernel for each
kind of row.

    KVPool            the keys and values of all requests, page by page
    AttentionInputs   inputs of a backend's metadata of a step
    Attention         the interface; implementations are found through the registry
    PagedKernel       kernel of a backend that reads pages only, for one kind of row
    PagedBackend      decode rows stand first in a step and go to one kernel, prefill rows go to
                      another (or the same), so that routing is by token within one forward pass

Uses no model, no request, no policy and no graph. The memory manager decides which request owns a
page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
import torch

from pipeinfer.kernels.formats import E4M3, UNIT_KV_SCALES, KVScales
from pipeinfer.kernels.interface import DeviceStep, lazy_zeros, tensor_of
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

    Attributes:
    - k, v: of each layer, [num_pages, page_size, kv_heads, head_dim] in storage_dtype
    - num_pages: with the dummy page
    - page_size: tokens of a page
    - dtype: of keys and values as the model computes them
    - storage_dtype: of the numbers in the pages: dtype, or e4m3
    - scales: of each layer; 1 if storage_dtype is dtype
    - key_centers: of each layer, float32 [kv_heads, head_dim], subtracted from keys before they
      become e4m3; None: nothing is subtracted
    - shapes: of each layer

    Page 0 is a dummy: no request owns it, padding reads it. All pages start as zeros, because
    padding is read before it is written: a masked position has weight 0, and 0 times a NaN of fresh
    memory would be NaN. Backends that read whole pages rely on zeros, too.
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
        """Allocates the pool, or lays it over `memory`.

        - scales: of each layer; None: pages store values as they are, and nothing is subtracted
        - memory: uint8 [num_pages * bytes_per_page] on `device`, which has the pages; None: they
          are allocated

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
        """Returns views of K and V of each layer, [num_pages * page_size, kv_heads * head_dim]: a
        row is a token's, so the slot mapping is an index. A gather of rows is six times faster than
        one by [page, offset].
        """
        k = [k.view(-1, k.shape[2] * k.shape[3]) for k in self.k]
        return k, [v.view(-1, v.shape[2] * v.shape[3]) for v in self.v]

    def _bytes_of(self, size: tuple[int, ...]) -> int:
        return prod(size) * self.storage_dtype.itemsize

    def byte_runs(self, pages: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yields (begin, end) of all bytes of `pages` int32 [n], ascending, within the memory that
        the pool was made with, in runs as long as possible.
        """
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1) if len(pages) else []
        at = 0
        for part in (one for pair in zip(self.k, self.v, strict=True) for one in pair):
            page = self._bytes_of(part.shape[1:])
            for run in runs:
                yield at + int(run[0]) * page, at + (int(run[-1]) + 1) * page
            at += self._bytes_of(part.shape)

    def zero_pages(self, pages: np.ndarray) -> None:
        """Zeroes `pages` int32 [n] of a request that may have left NaN there.

        The next owner of a page fills it token by token, and FlashAttention-3 also multiplies the
        values after the end of a row (https://github.com/Dao-AILab/flash-attention/issues/2374).
        """
        at = tensor_of(pages.astype(np.int64)).to(self.device)
        for part in (*self.k, *self.v):
            by_page = part.view(torch.uint8).view(self.num_pages, -1)  # e4m3 cannot be filled
            if by_page.shape[1] % 8 == by_page.storage_offset() % 8 == 0:
                by_page = by_page.view(torch.int64)
            by_page.index_fill_(0, at, 0)

    def of_layers(self, begin: int, end: int) -> KVPool:
        """Returns a view of the pool: the same pages, of layers begin .. end - 1 alone."""
        part = copy(self)
        part.shapes, part.scales = self.shapes[begin:end], self.scales[begin:end]
        part.key_centers = self.key_centers[begin:end]
        part.k, part.v = self.k[begin:end], self.v[begin:end]
        return part

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, K and V together."""
        return bytes_per_page(self.shapes, self.page_size, self.storage_dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole pool; on a CPU they become real memory only as tokens are stored."""
        return self.num_pages * self.bytes_per_page


# Data that a backend's layers share in one step: indices, masks, work lists. Only the backend that
# built it reads it.
AttentionMetadata = Any
KV = torch.Tensor | None  # [T, kv_heads, head_dim] of a step's tokens; None: in pages only


@dataclass(frozen=True)
class BackendCapabilities:
    """Capabilities and demands of a backend; callers read them instead of the backend's name.

    Attributes:
    - page_sizes: supported page sizes, in tokens; None: any
    - preferred_page_size: page size without a setting, in tokens
    - needs_kv: the backend attends to the step's own keys and values as tensors, too; else it reads
      pages only
    - host_lengths: the metadata depends on lengths that the backend reads on the host
      (AttentionInputs.host), so a graph's metadata is built before each replay
    - captures_decode: a CUDA graph can hold steps of decode rows (only without needs_kv: a graph's
      padding rows have no keys)
    - captures_prefill: a CUDA graph can hold steps with both kinds of rows
    - lists_pages: kv_indices has the pages of row after row, else it is the page table of all slots
    - page_table: the rows whose pages the backend reads in DeviceStep.row_page_table: "all", the
      "prefills" or "none"
    - shares: the backend supports cascade attention: common prefix pages of decode rows are read
      once for several rows
    """

    page_sizes: tuple[int, ...] | None
    preferred_page_size: int
    needs_kv: bool = False
    host_lengths: bool = False
    captures_decode: bool = False
    captures_prefill: bool = False
    lists_pages: bool = False
    page_table: Literal["none", "prefills", "all"] = "none"
    shares: bool = False


@dataclass(frozen=True)
class HostLengths:
    """Lengths on the host, for backends with `host_lengths`: the tensors of DeviceStep with these
    names, int32 on the CPU. Computed from the words that are uploaded, so the device is not waited
    for.
    """

    last_page_len: torch.Tensor
    qo_indptr: torch.Tensor
    prefill_qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor


def qo_indptr_of(lengths: DeviceStep | HostLengths, begin: int, end: int) -> torch.Tensor:
    """Returns int32 [end - begin + 1], the first query of rows begin .. end - 1, which are the
    decode rows or all the others. lengths: on the device or on the host.
    """
    return lengths.qo_indptr[: end + 1] if begin == 0 else lengths.prefill_qo_indptr


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of a backend's metadata: the step on the device, and its sizes on the host.

    Attributes:
    - step: expanded already, except a graph's (`step.padded`): then its arrays stand at addresses
      that a graph has captured, and padding rows must not write anything
    - max_query_len: queries of the longest row
    - max_pages: pages of the longest row; for a graph, pages of the longest possible request
    - parity: which double buffers of the host the step has, 0 or 1 (StepBuffers,
      engine/step_buffers.py)
    - host: lengths on the host; None for backends without `host_lengths`
    """

    step: DeviceStep
    max_query_len: int
    max_pages: int
    parity: int = 0
    host: HostLengths | None = None

    @property
    def on_host(self) -> HostLengths:
        """Lengths on the host. Raises AssertionError for a backend without `host_lengths`."""
        assert self.host is not None
        return self.host


class Attention(Protocol):
    """A backend of attention: attends over the pages of each row, in which the step's K and V are
    stored already.
    """

    @property
    def traits(self) -> BackendCapabilities:
        """Capabilities of the backend; constant, also before a pool is bound."""
        ...

    def bind(self, pool: KVPool, max_rows: int, /) -> None:
        """Sets the pool that later steps read; a step has at most `max_rows` rows."""
        ...

    def build_metadata(self, inputs: AttentionInputs, /) -> AttentionMetadata:
        """Builds the data that all layers of a step share: indices, masks, work lists; copies go to
        the current stream. The metadata of the next step may be built while layers still read this
        step's, so the caller keeps it until the layers are done. Later metadata of a graph goes to
        the addresses of its first.
        """
        ...

    def attend(
        self, layer: int, q: torch.Tensor, k: KV, v: KV, metadata: AttentionMetadata, /
    ) -> torch.Tensor:
        """Attends with q [T, heads, head_dim], decodes first; returns a tensor of that shape. k, v:
        the stored keys and values of the step; may be None for a backend without `needs_kv`. Rows
        may be strided, the last two dimensions are contiguous.
        """
        ...


class AttentionKind(Protocol):
    """An entry of the registry: a class of backends, or a callable that makes backends."""

    @property
    def traits(self) -> BackendCapabilities:
        """Capabilities of all backends of that kind."""
        ...

    def __call__(self, shapes: Sequence[AttentionShape], device: torch.device, /) -> Attention:
        """Makes a backend for layers of `shapes`; loads the kernels that it needs."""
        ...


PAGE_SIZES = (1, 16, 32, 64, 128, 256)  # tokens; that all paged kernels take
PREFERRED_PAGE_SIZE = 64  # tokens; with which paged kernels were measured


class PagedKernel(Protocol):
    """A kernel family for one kind of row. No method waits for the device."""

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """Sets the pool to read; `max_rows` bounds the rows of one step."""
        ...

    def build_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> AttentionMetadata:
        """Prepares rows begin .. end - 1 for all layers; copies go to the current stream."""
        ...

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """Attends with q [n, heads, head_dim] of those rows into `out` of the same shape."""
        ...


KernelMaker = Callable[[Sequence[AttentionShape], torch.device], PagedKernel]


@dataclass(frozen=True)
class PagedMetadata:
    """The kernels' metadata of one step.

    Attributes:
    - decodes: rows of one token (StepShape), which come first
    - decode, prefill: metadata of each kernel; None: the step has no such row
    - prefill_from: the token from which prefill rows count their queries
    - at_once: both kernels may run at the same time, because they write nothing in common
    """

    decodes: int
    decode: AttentionMetadata
    prefill: AttentionMetadata
    prefill_from: int = 0
    at_once: bool = False


class PagedBackend:
    """An `Attention` that sends decode rows to one kernel and prefill rows to another.

    In a graph both run at the same time: decodes wait for memory, a few prompts leave most of the
    GPU idle.
    """

    def __init__(
        self, kind: PagedKind, shapes: Sequence[AttentionShape], device: torch.device
    ) -> None:
        self.traits = kind.traits
        self._decode = kind.decode(shapes, device)
        same = kind.prefill is kind.decode
        self._prefill = self._decode if same else kind.prefill(shapes, device)
        # A stream of higher priority: each block of the prefill kernel needs a multiprocessor of
        # its own, and would find none free once the decode kernel's blocks run.
        self._prefill_stream = torch.cuda.Stream(device, priority=-1) if kind.at_once else None

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """See `Attention.bind`."""
        for kernel in {id(kernel): kernel for kernel in (self._decode, self._prefill)}.values():
            kernel.bind(pool, max_rows)

    def build_metadata(self, inputs: AttentionInputs) -> PagedMetadata:
        step, decodes, total = (
            inputs.step,
            inputs.step.shape.num_decodes,
            inputs.step.shape.num_rows,
        )
        decode = prefill = None
        if decodes:
            decode = self._decode.build_metadata(inputs, 0, decodes)
        if decodes < total:
            prefill = self._prefill.build_metadata(inputs, decodes, total)
        both = decode is not None and prefill is not None
        return PagedMetadata(
            decodes, decode, prefill, step.prefill_query_base, at_once=step.padded and both
        )

    def attend(
        self, layer: int, q: torch.Tensor, k: KV, v: KV, metadata: PagedMetadata
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        if metadata.at_once and self._prefill_stream is not None:
            stream = torch.cuda.current_stream()
            self._prefill_stream.wait_stream(stream)
            with torch.cuda.stream(self._prefill_stream):
                self._run_prefill(layer, q, out, metadata)
            self._run_decode(layer, q, out, metadata)
            stream.wait_stream(self._prefill_stream)
            return out
        if metadata.decode is not None:
            self._run_decode(layer, q, out, metadata)
        if metadata.prefill is not None:
            self._run_prefill(layer, q, out, metadata)
        return out

    def _run_decode(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: PagedMetadata
    ) -> None:
        self._decode.run(layer, q[: metadata.decodes], out[: metadata.decodes], metadata.decode)

    def _run_prefill(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: PagedMetadata
    ) -> None:
        begin = metadata.prefill_from
        self._prefill.run(layer, q[begin:], out[begin:], metadata.prefill)


@dataclass(frozen=True)
class PagedKind:
    """An `AttentionKind` of a PagedBackend, which is built only when the kind is called with
    (shapes, device).

    Attributes:
    - decode, prefill: make the kernels of decode rows and of prefill rows
    - traits: capabilities. With captures_prefill, the prefill kernel's metadata is device arrays
      only, and the decode kernel leaves out rows without keys
    - at_once: in a graph both kernels run at the same time
    """

    decode: KernelMaker
    prefill: KernelMaker
    traits: BackendCapabilities
    at_once: bool = False

    def __call__(self, shapes: Sequence[AttentionShape], device: torch.device) -> PagedBackend:
        return PagedBackend(self, shapes, device)

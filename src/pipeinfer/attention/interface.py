"""What an attention backend is, on every device: metadata per step, a call per layer. And the
backend that reads pages only, by one kernel for each kind of row.

    AttentionInputs   what a backend's metadata of a step is made from
    Attention         the interface; implementations are found through the registry
    PagedKernel       of such a backend, for one kind of row
    PagedBackend      decode rows stand first in a step and go to one kernel, prefill rows go to
                      another (or the same), so that routing is by token within one forward pass

Knows no model, no request, no policy and no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from pipeinfer.kernels.interface import DeviceStep
from pipeinfer.memory.kv_pool import KVPool
from pipeinfer.step import AttentionShape

# What a backend's layers share in one step: indices, masks, work lists. Only the backend that built
# it reads it.
AttentionMetadata = Any
KV = torch.Tensor | None  # [T, kv_heads, head_dim] of a step's tokens; None: in pages only


@dataclass(frozen=True)
class Traits:
    """What callers need to know of a backend; no caller asks for its name.

    page_sizes: those that it takes, None for any. needs_kv: it attends to the step's own keys and
    values, too; else it reads pages only. host_lengths: its metadata depends on lengths that it
    reads on the host (AttentionInputs.host), so a graph's metadata is built before each replay.
    captures_decode: a CUDA graph can hold steps of decode rows (only without needs_kv: a graph's
    padding rows have no keys); captures_prefill: and steps with both kinds of rows.
    lists_pages: kv_indices has the pages of row after row, else it is the page table of all slots.
    page_table: the rows whose pages it reads in DeviceStep.row_page_table: "all", the "prefills" or
    "none".
    shares: keys and values that decodes begin with in common may be read once for several of them.
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
    """For backends with `host_lengths`: what DeviceStep has under these names, int32 on the CPU.
    Made of the words that are uploaded, so the device is not waited for."""

    last_page_len: torch.Tensor
    qo_indptr: torch.Tensor
    prefill_qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor

    def queries(self, begin: int, end: int) -> torch.Tensor:
        """As DeviceStep.qo_indptr_of."""
        return self.qo_indptr[: end + 1] if begin == 0 else self.prefill_qo_indptr


@dataclass(frozen=True)
class AttentionInputs:
    """What a backend builds metadata from: the step on the device, and its sizes on the host.

    step: which is expanded already, except a graph's (`step.padded`): then its arrays stand at
    addresses that a graph has captured, and padding rows must not write anything.
    max_query_len: queries of the longest row. max_pages: pages of the longest row; of a graph's,
    those of the longest request. parity: which double buffers of the host the step
    has, 0 or 1 (StepBuffers, engine/step_buffers.py). host: for backends whose
    traits say `host_lengths`.
    """

    step: DeviceStep
    max_query_len: int
    max_pages: int
    parity: int = 0
    host: HostLengths | None = None

    @property
    def on_host(self) -> HostLengths:
        """Raises AssertionError for a backend whose traits do not say that it wants them."""
        assert self.host is not None
        return self.host


class Attention(Protocol):
    """A backend: attends over the pages of each row, where the step's K and V are already."""

    @property
    def traits(self) -> Traits:
        """The same always, also before a pool is bound."""
        ...

    def bind(self, pool: KVPool, max_rows: int, /) -> None:
        """The pool that later steps read; a step has at most `max_rows` rows."""
        ...

    def build_metadata(self, inputs: AttentionInputs, /) -> AttentionMetadata:
        """What all layers of a step share: indices, masks, work lists; copies go to the current
        stream. The metadata of the next step may be built while layers still read this step's, so
        the caller keeps it until they are done. Later metadata of a graph goes to the addresses of
        its first.
        """
        ...

    def attend(
        self, layer: int, q: torch.Tensor, k: KV, v: KV, metadata: AttentionMetadata, /
    ) -> torch.Tensor:
        """q [T, heads, head_dim], decodes first: a tensor of that shape. k, v: what was stored of
        the step; maybe None for a backend without `needs_kv`. Rows may be strided, the last two
        dimensions are contiguous.
        """
        ...


class AttentionKind(Protocol):
    """What the registry names: a class of backends, or what is called like one."""

    @property
    def traits(self) -> Traits:
        """Those of all backends of that kind."""
        ...

    def __call__(self, shapes: Sequence[AttentionShape], device: torch.device, /) -> Attention:
        """A backend for layers of `shapes`; loads the kernels that it needs."""
        ...


PAGE_SIZES = (1, 16, 32, 64, 128, 256)  # tokens; that all paged kernels take
PREFERRED_PAGE_SIZE = 64  # tokens; with which paged kernels were measured


class PagedKernel(Protocol):
    """One kernel family for one kind of row. Nothing here waits for the device."""

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """The pool to read; `max_rows` bounds the rows of one step."""
        ...

    def build_metadata(self, inputs: AttentionInputs, begin: int, end: int) -> AttentionMetadata:
        """Prepares rows begin..end-1 for all layers; copies go to the current stream."""
        ...

    def run(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        """Attends with q [n, heads, head_dim] of those rows into `out` of the same shape."""
        ...


KernelMaker = Callable[[Sequence[AttentionShape], torch.device], PagedKernel]


@dataclass(frozen=True)
class PagedMetadata:
    """The kernels' metadata of one step; None where there is no such row.

    decodes: rows of one token (GraphShape), which come first. decode, prefill: by kernel.
    prefill_from: the token from which prefill rows count their queries. at_once: both kernels may
    run at the same time, because they write nothing in common.
    """

    decodes: int
    decode: AttentionMetadata
    prefill: AttentionMetadata
    prefill_from: int = 0
    at_once: bool = False


class PagedBackend:
    """Decode rows through one kernel, prefill rows through another: an `Attention`.

    In a graph both run at once: decodes wait for memory, a few prompts leave most of the GPU idle.
    """

    def __init__(
        self, kind: PagedKind, shapes: Sequence[AttentionShape], device: torch.device
    ) -> None:
        self.traits = kind.traits
        self._decode = kind.decode(shapes, device)
        same = kind.prefill is kind.decode
        self._prefill = self._decode if same else kind.prefill(shapes, device)
        # Of higher priority: each block of the prefill kernel needs a multiprocessor of its own,
        # and would find none free once the decode kernel's blocks run.
        self._prefill_stream = torch.cuda.Stream(device, priority=-1) if kind.at_once else None

    def bind(self, pool: KVPool, max_rows: int) -> None:
        """See interface.py, here and below."""
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
    """An `AttentionKind`: its kernels, built only when it is called with (shapes, device).

    With captures_prefill, the prefill kernel's metadata is device arrays only, and the decode
    kernel leaves out rows without keys. at_once: in a graph both run at the same time.
    """

    decode: KernelMaker
    prefill: KernelMaker
    traits: Traits
    at_once: bool = False

    def __call__(self, shapes: Sequence[AttentionShape], device: torch.device) -> PagedBackend:
        return PagedBackend(self, shapes, device)

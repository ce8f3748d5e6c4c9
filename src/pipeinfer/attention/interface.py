"""What an attention backend is, on every device: metadata per step, a call per layer.

Knows no model, no request and no policy; implementations are found through the registry.
"""

from __future__ import annotations

from collections.abc import Sequence
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

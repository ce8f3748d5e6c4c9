"""What an attention backend is, on every device: a plan per step, a call per layer.

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

Plan = Any  # what a backend makes of a step's rows: nobody else looks into it
KV = torch.Tensor | None  # [T, kv_heads, head_dim] of a step's tokens; None: in pages only


@dataclass(frozen=True)
class Traits:
    """What differs between backends, for those who call them: nobody asks which one it is.

    page_sizes: those that it takes, None for any. needs_kv: it attends to the step's own keys and
    values, too; else it reads pages only. host_lengths: its plans depend on lengths that it reads
    on the host (PlanInputs.host), so the rows of a graph are planned anew before each replay.
    captures_decode: a CUDA graph can hold steps of decode rows (without needs_kv only, because
    padding has keys that nobody keeps); captures_prefill: and steps with both kinds of rows.
    lists_pages: kv_indices has the pages of row after row, else it is the page table of all slots.
    block_table: which rows it reads there: of "all", of the "prefills" or of "none".
    shares: keys and values that decodes begin with in common may be read once for several of them.
    """

    page_sizes: tuple[int, ...] | None
    preferred_page_size: int
    needs_kv: bool = False
    host_lengths: bool = False
    captures_decode: bool = False
    captures_prefill: bool = False
    lists_pages: bool = False
    block_table: Literal["none", "prefills", "all"] = "none"
    shares: bool = False


@dataclass(frozen=True)
class HostLengths:
    """For backends that plan on the host: what DeviceStep has under these names, int32 on the CPU.
    Made of the words that are uploaded, so the device is not waited for."""

    last_page_len: torch.Tensor
    qo_indptr: torch.Tensor
    prefill_qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor

    def queries(self, begin: int, end: int) -> torch.Tensor:
        """As DeviceStep.qo_indptr_of."""
        return self.qo_indptr[: end + 1] if begin == 0 else self.prefill_qo_indptr


@dataclass(frozen=True)
class PlanInputs:
    """What a backend plans a step from: its views on the device, and what the host knows of it.

    step: which is expanded already, except a graph's (`step.padded`): then its arrays stand at
    addresses that a graph has captured, and padding rows must not write anything.
    max_query_len: queries of the longest row. max_pages: pages of the longest row; of a graph's,
    those of the longest request. parity: of the step's private buffers. host: for backends whose
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

    def bind(self, pool: KVPool, most_rows: int, /) -> None:
        """The pool that later steps read; a step has at most `most_rows` rows."""
        ...

    def plan(self, inputs: PlanInputs, /) -> Plan:
        """What all layers of a step share: indices, masks, work lists; copies go to the current
        stream. The plan of the next step may be made while layers still read this one, which its
        caller keeps until they are done. Later plans of a graph's step go to where the first one
        lies.
        """
        ...

    def attend(self, layer: int, q: torch.Tensor, k: KV, v: KV, plan: Plan, /) -> torch.Tensor:
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

"""What an attention backend is, on every device: a plan per step, a call per layer.

Knows no model, no request and no policy; implementations are found through the registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from pipeinfer.attention.rows import PagedRows
from pipeinfer.memory.pool import KVPool
from pipeinfer.steps.shape import AttentionShape

Plan = Any  # what a backend makes of a step's rows: nobody else looks into it
KV = torch.Tensor | None  # [T, kv_heads, head_dim] of a step's tokens; None: in pages only


@dataclass(frozen=True)
class Traits:
    """What differs between backends, for those who call them: nobody asks which one it is.

    page_sizes: those that it takes, None for any. needs_kv: it attends to the step's own keys and
    values, too; else it reads pages only. host_lengths: its plans depend on lengths and pages that
    it reads on the host, so the rows of a graph are planned anew before each replay.
    captures_decode: a CUDA graph can hold steps of decode rows (without needs_kv only, because
    padding has keys that nobody keeps); captures_prefill: and steps with both kinds of rows.
    listed, gathered: what it reads of RowArrays beside the page table of all slots: `indices` row
    after row; `table` of "all" rows or of the "prompts", which have more than one query.
    shares: keys and values that decodes begin with in common may be read once for several of them.
    """

    page_sizes: tuple[int, ...] | None
    preferred_page_size: int
    needs_kv: bool = False
    host_lengths: bool = False
    captures_decode: bool = False
    captures_prefill: bool = False
    listed: bool = False
    gathered: Literal["no", "prompts", "all"] = "no"
    shares: bool = False


class Attention(Protocol):
    """A backend: attends over the pages of each row, where the step's K and V are already."""

    @property
    def traits(self) -> Traits:
        """The same always, also before a pool is bound."""
        ...

    def bind(self, pool: KVPool, most_rows: int, /) -> None:
        """The pool that later steps read; a step has at most `most_rows` rows."""
        ...

    def plan(self, rows: PagedRows, /) -> Plan:
        """What all layers of a step share: indices, masks, work lists; copies go to the current
        stream. The plan of the next step may be made while layers still read this one, which its
        caller keeps until they are done. Later plans of the same `rows.fixed` go to where the first
        one lies.
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

"""What attention on a GPU is: rows of a step as index arrays, one kernel for each kind of row.

Decode rows stand first in a step and go to one part, prefill rows go to another (or the same), so
that routing is by token within one forward pass. Knows no model, no request and no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeinfer.memory.pool import KVPool
from pipeinfer.steps.shape import AttentionShape


@dataclass(frozen=True)
class RowArrays:
    """Index arrays of R rows, all int32, on the host or on the device.

    lengths [R]: keys of each row, this step's included. last_page [R]: keys in its last page.
    q_indptr [R + 1], kv_indptr [R + 1]: where a row's queries, and its pages in `indices`, begin.
    prefill_indptr [prefill rows + 1]: q_indptr of the rows after the decodes, from 0 on.
    indices [n]: all pages of row 0, of row 1 ... table [R, P]: the same by row, padded; it may hold
    the last rows only.
    """

    lengths: torch.Tensor
    last_page: torch.Tensor
    q_indptr: torch.Tensor
    prefill_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    indices: torch.Tensor
    table: torch.Tensor

    def queries(self, begin: int, end: int) -> torch.Tensor:
        """[end - begin + 1] of rows begin..end-1, which are the decodes or all the others."""
        if begin == 0:
            return self.q_indptr[: end + 1]
        return self.prefill_indptr[: end - begin + 1]

    def page_table(self, begin: int, end: int) -> torch.Tensor:
        """int32 [end - begin, P] of rows begin..end-1."""
        missing = len(self.lengths) - len(self.table)
        return self.table[begin - missing : end - missing]


@dataclass(frozen=True)
class PagedRows:
    """`decodes` rows with one query, then rows with more. parity: which step-private buffers.

    fixed: the device arrays stand at addresses that a CUDA graph has captured. Prefill rows of a
    graph count their queries from the step's first token, because how many decode rows are real
    changes from replay to replay; those that are not have no keys, and must not write anything.
    """

    decodes: int
    longest_query: int
    parity: int
    host: RowArrays
    device: RowArrays
    fixed: bool = False


class Part(Protocol):
    """One kernel family for one kind of row. Nothing here waits for the device."""

    def bind(self, pool: KVPool, most_rows: int) -> None:
        """The pool to read; `most_rows` bounds the rows of one step."""
        ...

    def plan(self, rows: PagedRows, begin: int, end: int) -> Any:
        """Prepares rows begin..end-1 for all layers; copies go to the current stream."""
        ...

    def refresh(self, rows: PagedRows, begin: int, end: int) -> None:
        """Before a graph is replayed: what of its plan depends on the lengths of these rows."""
        ...

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: Any) -> None:
        """Attends with q [n, heads, head_dim] of those rows into `out` of the same shape."""
        ...


PartMaker = Callable[[Sequence[AttentionShape], torch.device], Part]


@dataclass(frozen=True)
class PagedPlan:
    """The parts' plans of one step; None where there is no such row.

    prefill_from: the token from which prefill rows count their queries. at_once: both parts may run
    at the same time, because they write nothing in common.
    """

    decodes: int
    decode: Any
    prefill: Any
    prefill_from: int = 0
    at_once: bool = False


class PagedBackend:
    """Decode rows through one part, prefill rows through another. K and V are stored already.

    In a graph both run at once: decodes wait for memory, a few prompts leave most of the GPU idle.
    """

    def __init__(
        self, kind: PagedKind, shapes: Sequence[AttentionShape], device: torch.device
    ) -> None:
        self.page_sizes = kind.page_sizes
        self.preferred_page_size = kind.preferred_page_size
        self.reads_table_to_decode = kind.reads_table_to_decode
        self.captures_prefill = kind.captures_prefill
        self._decode = kind.decode(shapes, device)
        same = kind.prefill is kind.decode
        self._prefill = self._decode if same else kind.prefill(shapes, device)
        # Of higher priority: its blocks need a multiprocessor each, and find none free later on.
        self._beside = torch.cuda.Stream(device, priority=-1) if self.captures_prefill else None

    def bind(self, pool: KVPool, most_rows: int) -> None:
        """The pool that later steps read; a step has at most `most_rows` rows."""
        for part in {id(part): part for part in (self._decode, self._prefill)}.values():
            part.bind(pool, most_rows)

    def plan(self, rows: PagedRows) -> PagedPlan:
        """What all layers of a step share; on a graph's fixed arrays, when it is captured."""
        total = len(rows.host.lengths)
        decode = prefill = None
        if rows.decodes:
            decode = self._decode.plan(rows, 0, rows.decodes)
        if rows.decodes < total:
            prefill = self._prefill.plan(rows, rows.decodes, total)
        both = decode is not None and prefill is not None
        begin = 0 if rows.fixed else rows.decodes
        return PagedPlan(rows.decodes, decode, prefill, begin, at_once=rows.fixed and both)

    def refresh(self, rows: PagedRows) -> None:
        """Brings the plan of a graph's fixed arrays up to date, before each replay."""
        total = len(rows.host.lengths)
        if rows.decodes:
            self._decode.refresh(rows, 0, rows.decodes)
        if rows.decodes < total:
            self._prefill.refresh(rows, rows.decodes, total)

    def run(self, layer: int, q: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        """q [T, heads, head_dim], decodes first; returns that shape."""
        out = torch.empty_like(q)
        if plan.at_once and self._beside is not None:
            stream = torch.cuda.current_stream()
            self._beside.wait_stream(stream)
            with torch.cuda.stream(self._beside):
                self._run_prefill(layer, q, out, plan)
            self._run_decode(layer, q, out, plan)
            stream.wait_stream(self._beside)
            return out
        if plan.decode is not None:
            self._run_decode(layer, q, out, plan)
        if plan.prefill is not None:
            self._run_prefill(layer, q, out, plan)
        return out

    def _run_decode(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: PagedPlan) -> None:
        self._decode.run(layer, q[: plan.decodes], out[: plan.decodes], plan.decode)

    def _run_prefill(self, layer: int, q: torch.Tensor, out: torch.Tensor, plan: PagedPlan) -> None:
        begin = plan.prefill_from
        self._prefill.run(layer, q[begin:], out[begin:], plan.prefill)


@dataclass(frozen=True)
class PagedKind:
    """A registered backend: its parts, built only when it is called with (shapes, device).

    captures_prefill: the prefill part's plan is device arrays only, and the decode part reads
    `indices` and leaves out rows without keys, so that a CUDA graph can hold both kinds of rows.
    """

    decode: PartMaker
    prefill: PartMaker
    page_sizes: tuple[int, ...] | None
    preferred_page_size: int
    reads_table_to_decode: bool = False
    captures_prefill: bool = False

    def __call__(self, shapes: Sequence[AttentionShape], device: Any) -> PagedBackend:
        return PagedBackend(self, shapes, torch.device(device))

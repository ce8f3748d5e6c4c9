"""Attention that reads pages only, by one kernel for each kind of row.

Decode rows stand first in a step and go to one kernel, prefill rows go to another (or the same), so
that routing is by token within one forward pass. Knows no model, no request and no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pipeinfer.attention.interface import KV, AttentionInputs, AttentionMetadata, Traits
from pipeinfer.memory.kv_pool import KVPool
from pipeinfer.step import AttentionShape

PAGE_SIZES = (1, 16, 32, 64, 128, 256)  # that all of these kernels take
PREFERRED = 64  # with which they were measured


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

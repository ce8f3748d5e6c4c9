"""Steps with prompts as CUDA graphs: launched one by one, their kernels would take longer to start
than to run where a step has few tokens.

A graph has room for so many tokens, decode rows and prefill rows; how many are real may differ
from replay to replay. As graphs.py otherwise. Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeinfer.attention.interface import Plan
from pipeinfer.attention.rows import PagedRows
from pipeinfer.engine.cuda import graphs, packing
from pipeinfer.engine.cuda.decode_packing import Packed
from pipeinfer.engine.cuda.layout import Layout, Sizes
from pipeinfer.engine.cuda.sampling import restricted
from pipeinfer.step_cost import steps_up_to
from pipeinfer.steps.step import Step

FEW, SOME = 8, 32  # prompts in a step: alone, and beside decodes
PROMPT, MANY = 64, 128  # in large steps, one for so many tokens, up to so many prompts
DECODES = 64  # the smallest class of decode rows, each other has twice as many
LARGE = 1024  # tokens of a step: beyond it rows that are not there cost nothing, and one class does
MOST_PADDING = 128  # tokens, or
PADDING_SHARE = 4  # that part of a graph's


@dataclass(frozen=True, order=True)
class MixedSize:
    """Room for `tokens` of all rows, for `decodes` rows of one token and `prefills` of more."""

    tokens: int
    decodes: int
    prefills: int

    @property
    def rows(self) -> int:
        """Decode rows, then prefill rows."""
        return self.decodes + self.prefills


def ladder(
    most_tokens: int, most_rows: int, most_decodes: int, mixed: int
) -> tuple[MixedSize, ...]:
    """Sizes up to steps of `most_tokens` and `most_rows`, ascending: of prompts alone, and of
    prompts beside decodes that together have `mixed` tokens, or a few more where the decodes alone
    nearly have. None if graphs of decodes are off (most_decodes 0).
    """
    if not most_decodes:
        return ()
    doubled = (DECODES << power for power in range(most_decodes.bit_length()))
    classes = sorted({*(rows for rows in doubled if rows < most_decodes), most_decodes})
    largest = max(mixed, most_decodes + mixed // PADDING_SHARE)
    every = steps_up_to(most_tokens)
    alone = [(tokens, 0, min(_prompts(tokens, FEW), most_rows)) for tokens in every]
    beside: list[tuple[int, int, int]] = []
    for tokens in every:
        some = min(_prompts(tokens, SOME), most_rows)
        # Of each size also one with as many decodes as it has room for.
        full = min(max(tokens - some, classes[0]), most_decodes)
        if tokens < largest + DECODES:
            rows = {*classes, full} if tokens <= LARGE else {most_decodes}
            beside += [(tokens, decodes, some) for decodes in rows]
    sizes = (MixedSize(*one) for one in (*alone, *beside))
    return tuple(sorted(size for size in sizes if size.rows <= size.tokens <= most_tokens))


def unaided(most_tokens: int, most_rows: int) -> tuple[MixedSize, ...]:
    """Sizes to be measured where no prompts are captured: of one prompt beside a few decodes."""
    decodes = min(DECODES, most_rows - 1)
    sizes = (MixedSize(tokens, decodes, 1) for tokens in steps_up_to(most_tokens))
    return tuple(size for size in sizes if decodes > 0 and size.rows < size.tokens)


def _prompts(tokens: int, few: int) -> int:
    """That a step of so many tokens has room for, at least `few`."""
    return max(few, min(tokens // PROMPT, MANY)) if tokens > LARGE else few


class MixedGraphs:
    """By size. `words`: the fixed int32 buffer that every graph reads."""

    def __init__(
        self, sizes: tuple[MixedSize, ...], most_samples: int, frame: graphs.Frame
    ) -> None:
        self.sizes = sizes
        self._frame = frame
        self._layouts = {size: self._layout(size, most_samples) for size in sizes}
        most = max((layout.words for layout in self._layouts.values()), default=0)
        self.words = torch.zeros(most, dtype=torch.int32, device=frame.device)
        self._host = np.zeros(most, dtype=np.int32)
        self._views: dict[MixedSize, packing.Views] = {}
        self._captured: dict[MixedSize, graphs.Captured] = {}

    def _layout(self, size: MixedSize, most_samples: int) -> Layout:
        pages, samples = self._frame.pages, min(size.rows, most_samples)
        sizes = Sizes(
            size.rows, size.tokens, samples, pages, size.decodes * pages, table_rows=size.prefills
        )
        return Layout(sizes)

    def fitting(self, step: Step) -> MixedSize | None:
        """The smallest captured size for the step; None if there is none, or it is far larger."""
        tokens, prefills = len(step.tokens), len(step.slots) - step.decodes
        for size in self.sizes:
            if size.tokens - tokens > max(MOST_PADDING, size.tokens // PADDING_SHARE):
                return None
            enough = size.tokens >= tokens and size.prefills >= prefills > 0
            if enough and size.decodes >= step.decodes and size in self._captured:
                return size
        return None

    def layout(self, size: MixedSize) -> Layout:
        """Where a step of that size lies in the buffer."""
        return self._layouts[size]

    def rows(
        self,
        size: MixedSize,
        parity: int,
        host: dict[str, torch.Tensor],
        device: dict[str, torch.Tensor],
    ) -> PagedRows:
        """The rows of a step of that size for the backend, out of its views on both sides."""
        return PagedRows(
            decodes=size.decodes,
            longest_query=size.tokens,
            parity=parity,
            host=graphs.row_arrays(host, size.prefills),
            device=graphs.row_arrays(device, size.prefills),
            fixed=True,
        )

    def pack(self, step: Step, size: MixedSize, buffer: np.ndarray) -> Packed:
        """Packs the step for the graph of that size into a buffer int32 of at least its words."""
        frame, layout = self._frame, self._layouts[size]
        if size not in self._views:
            self._views[size] = layout.host(self._host)
        used = packing.pack_mixed(
            step, self._views[size], frame.page_size, frame.dummy_slot, size.decodes
        )
        words = layout.indices_at + used
        buffer[:words] = self._host[:words]
        return Packed(words, np.arange(int(step.samples.sum())), restricted(step))

    def __getitem__(self, size: MixedSize) -> graphs.Captured:
        return self._captured[size]

    def capture(
        self,
        prepare: Callable[[MixedSize], Plan],
        body: graphs.Body,
        stream: torch.cuda.Stream,
        pool: Any,
        progress: Callable[[], None],
    ) -> None:
        """Captures every size, largest first, on `stream`, which is current; see graphs.py."""
        for size in reversed(self.sizes):
            layout = self._layouts[size]
            views = layout.tensors(self.words)
            made = graphs.record(body, prepare(size), layout, views, stream, pool)
            self._captured[size] = made
            progress()

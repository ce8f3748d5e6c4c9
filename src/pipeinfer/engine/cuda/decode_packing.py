"""Packs decode steps for CUDA graphs, one after another: where a step has the rows of the step
before, only what changed is computed.

The arrays are made in memory of its own and copied to a step's pinned buffer, which still has those
of an older step. Knows no device and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipeinfer.engine.cuda import packing
from pipeinfer.engine.cuda.layout import Layout
from pipeinfer.engine.cuda.sampling import changes_logits, truncated_rows
from pipeinfer.steps.step import Growth, Step

MOST_GROWING = 16  # rows; each costs a few calls, and packing everything about sixty
BLOCK = 256  # words that uploads are a multiple of, so that few sizes of them occur


class Packed(NamedTuple):
    """words: of the buffer that are of use; places: int64 [S], at which rows of the graph the
    step's sampling rows stand; restricted: whether a row wants more than temperature.
    """

    words: int
    places: np.ndarray
    restricted: bool


@dataclass
class _Kept:
    """What was packed last.

    follows: epoch and number of the step after it. used: page indices. place: int64 [R], the
    graph's row of each row of the step. truncated: whether a row has top-k, top-p or min-p.
    counters: views of all that is one more in the next step.
    """

    follows: tuple[int, int]
    size: int
    used: int
    place: np.ndarray
    truncated: bool
    packed: Packed
    counters: tuple[np.ndarray, ...]


class DecodePacker:
    """For graphs whose steps lie as `layouts` says, by their number of rows. table: pages are in a
    table by row; else in one list, row after row.
    """

    def __init__(
        self, layouts: dict[int, Layout], page_size: int, dummy_slot: int, table: bool
    ) -> None:
        self._layouts = layouts
        self._page_size, self._dummy_slot, self._table = page_size, dummy_slot, table
        words = max((layout.words for layout in layouts.values()), default=0)
        self._words = np.zeros(words, dtype=np.int32)
        self._views: dict[int, packing.Views] = {}
        self._kept: _Kept | None = None

    def pack(self, step: Step, size: int, buffer: np.ndarray) -> Packed:
        """The step as one of `size` rows, into the first words of `buffer` int32 [words]."""
        kept, growth = self._kept, step.growth
        if (
            growth is None
            or kept is None
            or kept.follows != (step.epoch, step.number)
            or kept.size != size
            or len(growth.rows) > MOST_GROWING
        ):
            kept = self._kept = self._whole(step, size)
        else:
            self._next(kept, step, growth)
        words = kept.packed.words
        buffer[:words] = self._words[:words]
        return kept.packed

    def _views_of(self, size: int) -> packing.Views:
        views = self._views.get(size)
        if views is None:
            views = self._views[size] = self._layouts[size].host(self._words)
        return views

    def _whole(self, step: Step, size: int) -> _Kept:
        views, rows = self._views_of(size), len(step.slots)
        used, place = packing.pack_decodes(
            step, views, self._page_size, self._dummy_slot, self._table
        )
        counted = ("positions", "lengths", "last_page", "store", "sample_positions")
        truncated = len(truncated_rows(step)) > 0
        restricted = truncated or changes_logits(step)
        packed = Packed(self._used_words(size, used), place[step.samples], restricted)
        counters = tuple(views[name][:rows] for name in counted)
        return _Kept((step.epoch, step.number + 1), size, used, place, truncated, packed, counters)

    def _used_words(self, size: int, used: int) -> int:
        layout = self._layouts[size]
        if self._table:
            return layout.words
        words = layout.indices_at + used
        return min(-(-words // BLOCK) * BLOCK, layout.words)

    def _next(self, kept: _Kept, step: Step, growth: Growth) -> None:
        """Every row one position further, and those of `growth` in a page of their own."""
        kept.follows = step.epoch, step.number + 1
        for counter in kept.counters:
            counter += 1
        if len(growth.rows):
            self._grow(kept, step, growth)
        restricted = kept.truncated or changes_logits(step)
        if restricted != kept.packed.restricted:
            kept.packed = kept.packed._replace(restricted=restricted)

    def _grow(self, kept: _Kept, step: Step, growth: Growth) -> None:
        views, rows = self._views_of(kept.size), kept.place[growth.rows]
        views["last_page"][rows] = 1
        views["store"][rows] = growth.pages * self._page_size
        if self._table:
            table = views["table"].reshape(kept.size, -1)
            table[rows, step.starts[growth.rows] // self._page_size] = growth.pages
            return
        _insert(views["indices"], views["kv_indptr"], kept.used, rows, growth.pages)
        kept.used += len(rows)
        kept.packed = kept.packed._replace(words=self._used_words(kept.size, kept.used))


def _insert(
    indices: np.ndarray, indptr: np.ndarray, used: int, rows: np.ndarray, pages: np.ndarray
) -> None:
    """A page at the end of each of `rows`, of the lists that `indptr` divides `indices` into."""
    order = np.argsort(rows)
    ends = indptr[rows[order] + 1].tolist()
    stop = used
    for before in range(len(ends) - 1, -1, -1):  # from the back, so that all is moved once
        at, end = int(order[before]), ends[before]
        indices[end + before + 1 : stop + before + 1] = indices[end:stop]
        indices[end + before] = pages[at]
        indptr[int(rows[at]) + 1 :] += 1
        stop = end

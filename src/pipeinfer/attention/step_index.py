"""From a step's rows to places in the flat pool: what each row reads, and in which buckets.

Pure NumPy over all rows at once; knows pages and positions, no tensors and no layers. A *place* is
page * page_size + offset: the index of one token in a layer's K or V seen as [tokens, ...].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Rows of one bucket share a padded [rows, longest] gather. A bucket ends where it would hold
# more tokens than this (so that what is gathered is still in the cache when it is read) ...
BUCKET_TOKENS = 2048
# ... or where a row is shorter than this share of the bucket's longest (so that little is padding).
BUCKET_SHORTEST = 0.8
# Rows behind a sliding window are cut into pieces of at least that many queries.
WINDOW_PIECE = 128


@dataclass(frozen=True)
class Piece:
    """Consecutive queries of one row: tokens first..first+count-1 of the step, from `start` on.

    The keys that they see are positions key_start .. start+count-1.
    """

    row: int
    first: int
    count: int
    start: int
    key_start: int

    @property
    def keys(self) -> int:
        """How many keys the piece reads."""
        return self.start + self.count - self.key_start


@dataclass(frozen=True)
class RowPages:
    """Pages of rows: position p of row r lies in page indices[indptr[r] + p // page_size]."""

    indptr: np.ndarray
    indices: np.ndarray
    page_size: int

    def places(self, rows: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """int64 places of `positions` of `rows` (broadcast against each other)."""
        page, offset = np.divmod(positions, self.page_size)
        return self.indices[self.indptr[rows] + page].astype(np.int64) * self.page_size + offset


def key_spans(lengths: np.ndarray, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(first key's position, number of keys), int64 [decodes] each, of single-token rows of that
    many tokens."""
    ends = lengths.astype(np.int64)
    firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    return firsts, ends - firsts


def length_buckets(lengths: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Cuts rows with that many keys into buckets of similar length.

    Returns (order, bounds): `order` sorts the rows by falling length; bucket i is
    order[bounds[i][0] : bounds[i][1]], its longest row first.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    bounds = []
    begin = 0
    while begin < len(order):
        longest = int(falling[begin])
        most = begin + max(BUCKET_TOKENS // longest, 1)
        alike = int(np.searchsorted(-falling, -longest * BUCKET_SHORTEST, side="right"))
        end = min(most, max(alike, begin + 1), len(order))
        bounds.append((begin, end))
        begin = end
    return order, bounds


def pieces(
    lengths: np.ndarray, q_indptr: np.ndarray, decodes: int, window: int | None
) -> Iterator[Piece]:
    """The rows after the `decodes`; under a sliding window long rows come in several pieces.

    Without the cut, every query of a long row would read the keys of all its windows. The arrays
    are DeviceStep's.
    """
    for row in range(decodes, len(lengths)):
        first, count = int(q_indptr[row]), int(q_indptr[row + 1] - q_indptr[row])
        start = int(lengths[row]) - count
        size = count if window is None else max(window, WINDOW_PIECE)
        for offset in range(0, count, size):
            begin = start + offset
            key_start = 0 if window is None else max(begin + 1 - window, 0)
            yield Piece(row, first + offset, min(size, count - offset), begin, key_start)

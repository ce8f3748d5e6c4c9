"""One step as arrays: what the memory manager decided and what the model runner computes from.

Knows no plan, no policy and no torch, and imports nobody: memory, attention and engine speak in
it. Rows are requests, tokens are the flattened rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

LAST_TOKEN = -1  # in Step.tokens: take the id that the previous step left in last_token[slot]


@dataclass(frozen=True)
class Growth:
    """What sets a step's rows apart from those of the step before, where they are the same rows in
    the same order and both decode one token of each: everything is one position further.

    rows: int64 [G], those that begin a page; pages: int32 [G], which one.
    """

    rows: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True)
class Said:
    """What the request in `slot` has in its prompt and in its output so far: ids int32 [n] each."""

    slot: int
    prompt: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class PenaltyRows:
    """The N of the rows that sample whose requests have penalties.

    rows, slots: int64 [N], which of the sampling rows, and their slots. factors: float32 [N, 3] for
    repetition (1 is off), frequency and presence (0 is off). new: of requests that sample in their
    slot for the first time; what follows is counted where it is sampled.
    """

    rows: np.ndarray
    slots: np.ndarray
    factors: np.ndarray
    new: tuple[Said, ...] = ()


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of the rows that sample, [S] each, in the order of those rows.

    fields: by name and in the dtypes that engine/fields.py declares. positions: int64, the absolute
    position of the token being sampled. suppress: (row, id) pairs int64 [n, 2] of ids that must not
    be sampled. penalties: None where no row has any.
    """

    fields: Mapping[str, np.ndarray]
    positions: np.ndarray
    suppress: np.ndarray
    penalties: PenaltyRows | None = None

    def take(self, rows: np.ndarray) -> SamplingRows:
        """The fields and positions of some of the rows; nothing suppressed, no penalties."""
        fields = {name: values[rows] for name, values in self.fields.items()}
        return SamplingRows(fields, self.positions[rows], self.suppress[:0])


_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Sampled:
    """What a step gave, for the S rows that sample, in their order.

    counts: int32 [S], how many tokens each row gave. ids: int32 [the sum of counts], row after row.
    bad: int32, ascending, the rows whose logits have no finite maximum or a NaN; they gave none.
    """

    counts: np.ndarray
    ids: np.ndarray
    bad: np.ndarray = field(default_factory=lambda: _NONE)

    @classmethod
    def of(cls, drawn: np.ndarray) -> Sampled:
        """Out of what a sampler draws: integers [S, 1 + k], of each row how many tokens it gave, 0
        in a bad row, and which; what stands behind them means nothing."""
        counts, ids = drawn[:, 0].astype(np.int32), drawn[:, 1:]
        if ids.shape[1] == 1 and counts.all():  # nearly always, and once a step
            return cls(counts, ids[:, 0].astype(np.int32))
        given = np.arange(ids.shape[1]) < counts[:, None]
        bad = np.flatnonzero(counts == 0).astype(np.int32)
        return cls(counts, ids[given].astype(np.int32), bad)

    @classmethod
    def one_each(cls, ids: Sequence[int] | np.ndarray) -> Sampled:
        """One token of each row: ids, any integers [S]."""
        return cls(np.ones(len(ids), dtype=np.int32), np.asarray(ids, dtype=np.int32))


@dataclass(frozen=True)
class Step:
    """R rows, T tokens. Rows with one token (decodes) come first, `decodes` of them.

    slots, starts, counts: int32 [R]; row r computes positions starts[r] .. starts[r]+counts[r]-1,
    counts[r] >= 1. tokens: int32 [T], known ids or LAST_TOKEN. samples: bool [R]; such a row's last
    position gives logits, and the sampled id goes to last_token[slots[r]].
    pages: int32 [R, P], this step's private copy of the page table: position p of row r lies in
    page pages[r, p // page_size] at offset p % page_size. Page 0 is a dummy that no request owns.
    growth: how it differs from step `number - 1`, where that had the same rows and both only
    decode; else None. cleared: int32 [n], pages to be zeroed before anything is computed.
    """

    epoch: int
    number: int
    decodes: int
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray
    pages: np.ndarray
    sampling: SamplingRows
    growth: Growth | None = None
    cleared: np.ndarray = field(default_factory=lambda: _NONE)

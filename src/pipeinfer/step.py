"""One step as arrays: what the memory manager decided and what the model runner computes from.

Knows no plan, no policy and no torch: memory, attention and engine speak in it. Rows are requests,
tokens are the flattened rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeinfer.params import StructuredOutputs, Thoughts

LAST_TOKEN = -1  # in Step.tokens: take the id that the previous step left in last_token[slot]


@dataclass(frozen=True)
class PenaltyHistory:
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
    new: tuple[PenaltyHistory, ...] = ()


@dataclass(frozen=True)
class LogprobRows:
    """The N of the rows that sample whose requests ask for log-probs of what they sample.

    rows: int64 [N], which of the sampling rows. most: int32 [N], how many alternatives of each.
    suppressed: some of them must not sample some id yet, so that its logit will be changed.
    """

    rows: np.ndarray
    most: np.ndarray
    suppressed: bool = False


@dataclass(frozen=True)
class Constrained:
    """The request in `slot` samples only what `spec` allows behind its output so far, ids int32
    [n], and thinks no longer than `budget` tokens; either may be None. `thoughts`: what it waits
    for and counts; None: nothing. `begin`: the position at which the output begins. `jumps`: ids
    that are forced may be said all at once."""

    slot: int
    spec: StructuredOutputs | None
    budget: int | None
    output: np.ndarray
    thoughts: Thoughts | None
    begin: int = 0
    jumps: bool = False


@dataclass(frozen=True)
class Extended:
    """The request in `slot` was told `ids` int32 [n] of its output from position `first` on."""

    slot: int
    first: int
    ids: np.ndarray


@dataclass(frozen=True)
class MaskRows:
    """The N of the rows that sample which may not sample every id.

    rows: int64 [N], which of the sampling rows. slots: int32 [N]. new: of requests that sample in
    their slot for the first time. extended: what was told of any since they sampled last.
    """

    rows: np.ndarray
    slots: np.ndarray
    new: tuple[Constrained, ...] = ()
    extended: tuple[Extended, ...] = ()


@dataclass(frozen=True)
class ScoredChunk:
    """Prompt tokens whose log-probs are asked for, with `most` alternatives each.

    slot: the request's. first: the first one's position. ids: int32 [n]. at: which of the step's
    tokens the first one follows; each of the others follows the next one.
    """

    slot: int
    first: int
    ids: np.ndarray
    at: int
    most: int


@dataclass(frozen=True)
class BadWords:
    """Sequences of two and more ids that an output must not have: the last id of one is not sampled
    where the others are the output's last ones.

    ends: int32 [n], where each of the n sequences ends in `ids` int32, one after the other. begin:
    the position at which the output begins. known: so many tokens of prompt and output are known;
    `recent` int32 are the last of these outputs.
    """

    ends: np.ndarray
    ids: np.ndarray
    begin: int
    num_known: int
    recent: np.ndarray


@dataclass(frozen=True)
class LogitEdits:
    """What the request in `slot` changes of single logits: of `ids` int32 [n], all different.

    until: int32 [n], the id is not sampled at positions before that one; from there on its logit is
    `values` float32 [n] higher. only: no other id is sampled.
    """

    slot: int
    ids: np.ndarray
    values: np.ndarray
    until: np.ndarray
    only: bool = False
    bad_words: BadWords | None = None


_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class StepDelta:
    """What a step changes of what lies on the device by slot, before it computes anything.

    pages: int32 [n], which from now on stand in columns `columns` [n] of the page table's rows
    `slots` [n]. admitted: int32 [a], slots with new requests, whose `fields` [a] these are, by
    name; `edits` are those of them that have any. cleared: int32, pages to be zeroed. released:
    slots whose requests had a grammar and are gone; some may have new ones.
    """

    slots: np.ndarray = field(default_factory=lambda: _NONE)
    columns: np.ndarray = field(default_factory=lambda: _NONE)
    pages: np.ndarray = field(default_factory=lambda: _NONE)
    admitted: np.ndarray = field(default_factory=lambda: _NONE)
    fields: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    edits: tuple[LogitEdits, ...] = ()
    cleared: np.ndarray = field(default_factory=lambda: _NONE)
    released: tuple[int, ...] = ()


NOTHING = StepDelta()


@dataclass(frozen=True)
class Sampled:
    """What a step gave, for the S rows that sample, in their order.

    counts: int32 [S], how many tokens each row gave. ids: int32 [the sum of counts], row after row.
    bad: int32, ascending, the rows whose logits have no finite maximum or a NaN; they gave none.
    refused: rows whose grammar allowed nothing, each with the reason; they gave none either.
    logprobs: scores (pipeinfer/wire.py) of the ids of rows that ask for them, row after row.
    prompts: those of each of the step's `prompts`.
    mask_units: what a mask of a row costs, in units (grammars/compiling.py), where it was found out
    anew and is much, or was.
    """

    counts: np.ndarray
    ids: np.ndarray
    bad: np.ndarray = field(default_factory=lambda: _NONE)
    logprobs: bytes = b""
    prompts: tuple[bytes, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict[int, str])
    mask_units: Mapping[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, drawn: np.ndarray, refused: Mapping[int, str] | None = None) -> Sampled:
        """Out of what a sampler draws: integers [S, 1 + k], of each row how many tokens it gave, 0
        in a bad row, and which; what stands behind them means nothing."""
        counts, ids, refused = drawn[:, 0].astype(np.int32), drawn[:, 1:], refused or {}
        counts[list(refused)] = 0
        if ids.shape[1] == 1 and counts.all():  # nearly always, and once a step
            return cls(counts, ids[:, 0].astype(np.int32))
        given = np.arange(ids.shape[1]) < counts[:, None]
        bad = np.flatnonzero(counts == 0).astype(np.int32)
        if refused:
            bad = bad[~np.isin(bad, list(refused))]
        return cls(counts, ids[given].astype(np.int32), bad, refused=refused)

    def followed_by(self, more: Mapping[int, Sequence[int]]) -> Sampled:
        """With `more` ids behind those of some rows, which have no log-probs."""
        counts, ends = self.counts.copy(), np.cumsum(self.counts)
        places, ids = list[int](), list[int]()
        for row, some in more.items():
            counts[row] += len(some)
            places += [int(ends[row])] * len(some)
            ids += some
        return replace(self, counts=counts, ids=np.insert(self.ids, places, ids))

    @classmethod
    def one_each(cls, ids: Sequence[int] | np.ndarray) -> Sampled:
        """One token of each row: ids, any integers [S]."""
        return cls(np.ones(len(ids), dtype=np.int32), np.asarray(ids, dtype=np.int32))


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes that decodes of a step have in common, int32 [decodes] each.

    leaders: leader * PREFIX_UPPER + pages, PREFIX_UPPER as in wire.py: the row's first `pages`
        pages are those of row `leader`, which may be itself; 0 where it has none in common.
    ranks: rank * PREFIX_UPPER + rows: its number among the rows with that leader, from 0, and how
        many these are, at least two.
    """

    leaders: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class Step:
    """One step on the host: what `Rows` (memory/manager.py) becomes, and what a DeviceStep
    (kernels/interface.py) is made from. Written by StepBuilder, read by Runner and the masks.

    R rows, T tokens, S rows that sample. Rows with one token (decodes) come first, `decodes` of
    them.

    slots, starts, counts: int32 [R]; row r computes positions starts[r] .. starts[r]+counts[r]-1,
    counts[r] >= 1. tokens: int32 [T], known ids or LAST_TOKEN. samples: bool [R]; such a row's last
    position gives logits, and the sampled id goes to last_token[slots[r]]. fields: sampling
    parameters of the rows that sample, [S] each, by name (engine/step_builder.py); steps of the
    same rows have the same object.
    penalties, logprobs: of the rows that sample those that ask for them.
    prompts: known tokens whose log-probs are asked for; the step computes those before them.
    masked: rows that may sample only what their grammars allow; which that is can be known when
    the step before has ended.
    shared_prefixes: where attention shares what it reads, and decodes have any in common.
    delta: applied first. Position p of row r lies in page table[slots[r], p // page_size] then, at
    offset p % page_size. Page 0 is a dummy that no request owns.
    """

    epoch: int
    number: int
    decodes: int
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray
    fields: Mapping[str, np.ndarray]
    penalties: PenaltyRows | None = None
    delta: StepDelta = NOTHING
    logprobs: LogprobRows | None = None
    prompts: tuple[ScoredChunk, ...] = ()
    masked: MaskRows | None = None
    shared_prefixes: SharedPrefixes | None = None


if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one rank. sliding_window: tokens a query sees, itself included; None is all.

    sinks: [num_heads], each head's score of a key that every query sees and that has no value.
    soft_cap: scaled scores become soft_cap * tanh(score / soft_cap).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    soft_cap: float | None = None

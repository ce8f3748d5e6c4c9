"""A step as arrays: written from the memory manager's decisions, read by the model runner.

Memory, attention and engine exchange these structures. Needs no torch to be imported, and knows no
policy. Rows are requests, tokens are the flattened rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pipeinfer.params import ReasoningContext, StructuredOutputs
from pipeinfer.wire import EMPTY_INT32, LOGPROB_WORDS, REJECTED, WORD

LAST_TOKEN = -1  # in Step.tokens: take the id that the slot sampled last, last_token[slot]


class PeerLost(RuntimeError):
    """A collective failed, so another rank is gone. Everything that this rank has written is
    complete."""


@dataclass(frozen=True)
class PenaltyHistory:
    """The tokens of a request with penalties, before its first sample in its slot.

    Attributes:
    - slot: slot of the request
    - prompt: int32 [n], ids of the prompt
    - output: int32 [n], ids of the output so far
    """

    slot: int
    prompt: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class PenaltyRows:
    """The N of the step's L rows of logits whose requests have penalties.

    Attributes:
    - rows: int64 [N], indices among the L
    - slots: int64 [N], slots of the requests
    - factors: float32 [N, 3], for repetition (1 is off), frequency and presence (0 is off)
    - new: requests that sample in their slot for the first time; ids that they sample from then on
      are counted on the device
    """

    rows: np.ndarray
    slots: np.ndarray
    factors: np.ndarray
    new: tuple[PenaltyHistory, ...] = ()


@dataclass(frozen=True)
class LogprobRows:
    """The N of the step's L rows of logits whose requests ask for log-probs of sampled ids.

    Attributes:
    - rows: int64 [N], indices among the L
    - num_alternatives: int32 [N], alternatives of each sampled id
    - suppressed: some of the requests must not sample some ids yet, so their logits will be changed
    """

    rows: np.ndarray
    num_alternatives: np.ndarray
    suppressed: bool = False


@dataclass(frozen=True)
class Constrained:
    """A request whose samples are restricted, by a grammar or by a budget of reasoning tokens.

    Attributes:
    - slot: slot of the request
    - spec: the grammar; None: any text
    - budget: most reasoning tokens; None: no limit
    - output: int32 [n], ids of the output so far; the grammar allows what may follow them
    - reasoning: tags and state of the reasoning; None: there is none to wait for or to count
    - begin: position at which the output begins
    - jumps: whether ids that the grammar forces may be produced all at once (jump-forward)
    """

    slot: int
    spec: StructuredOutputs | None
    budget: int | None
    output: np.ndarray
    reasoning: ReasoningContext | None
    begin: int = 0
    jumps: bool = False


@dataclass(frozen=True)
class AppendedTokens:
    """New output of a request whose samples are restricted.

    Attributes:
    - slot: slot of the request
    - first: position in the output of the first new id
    - ids: int32 [n], the new ids
    """

    slot: int
    first: int
    ids: np.ndarray


@dataclass(frozen=True)
class VectorRows:
    """The N of the step's L rows of logits whose requests ask for a pooled output (vector).

    Attributes:
    - rows: int64 [N], indices among the L
    - sizes: int32 [N], how many numbers of the row's hidden state
    - token_ids: of each row int64 [size], ids whose logits are the vector in place of the hidden
      state; empty: the hidden state
    """

    rows: np.ndarray
    sizes: np.ndarray
    token_ids: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class MaskRows:
    """The N of the step's L rows of logits that are sampled under a mask.

    Attributes:
    - rows: int64 [N], indices among the L
    - slots: int32 [N], slots of the requests
    - new: requests that sample in their slot for the first time
    - extended: new output of the other requests since they last sampled
    """

    rows: np.ndarray
    slots: np.ndarray
    new: tuple[Constrained, ...] = ()
    extended: tuple[AppendedTokens, ...] = ()


@dataclass(frozen=True)
class PromptLogprobChunk:
    """Prompt tokens whose log-probs are asked for.

    Attributes:
    - slot: slot of the request
    - first: position of the first token
    - ids: int32 [n], the tokens
    - at: index among the step's tokens of the one that the first token follows; each of the others
      follows the next one
    - num_alternatives: alternatives of each token
    """

    slot: int
    first: int
    ids: np.ndarray
    at: int
    num_alternatives: int


@dataclass(frozen=True)
class BadWords:
    """Sequences of two and more ids that an output must not have: the last id of a sequence is not
    sampled if the others are the output's last ones.

    Attributes:
    - ends: int32 [n], offset in `ids` of the end of each of the n sequences
    - ids: int32, the sequences, one after the other
    - begin: position at which the output begins
    - num_known: number of known tokens of prompt and output
    - recent: int32, the last known ids of the output
    """

    ends: np.ndarray
    ids: np.ndarray
    begin: int
    num_known: int
    recent: np.ndarray


@dataclass(frozen=True)
class RequestLogitEdits:
    """A request's changes of single logits.

    Attributes:
    - slot: slot of the request
    - ids: int32 [n], all different
    - values: float32 [n], added to the logits of `ids` from position `until` on
    - until: int32 [n], before this position the id is not sampled
    - only: no other ids are sampled
    - bad_words: sequences that the output must not have; None: no sequence
    """

    slot: int
    ids: np.ndarray
    values: np.ndarray
    until: np.ndarray
    only: bool = False
    bad_words: BadWords | None = None


@dataclass(frozen=True)
class DraftDelta:
    """The changes that a step makes to SlotDrafts (kernels/interface.py).

    Attributes:
    - token_ids: by slot, int32 [n], all known ids of a new request
    - lengths: by slot, number of computed tokens of a request that has its first drafts in this
      step
    """

    token_ids: Mapping[int, np.ndarray]
    lengths: Mapping[int, int]


@dataclass(frozen=True)
class StepDelta:
    """The changes that a step makes to the tables on the device, before it computes anything.

    Attributes:
    - slots, columns, pages: int32 [n]; pages[i] is written into row slots[i], column columns[i] of
      the page table
    - admitted: int32 [a], slots with new requests
    - fields: sampling parameters of the new requests, [a] each, by name
    - adapter_slots: int32 [a], adapter slot of each new request; 0: no adapter. Empty: no new
      request has an adapter
    - logit_edits: of those new requests that change single logits
    - pages_to_zero: int32 [n], pages that are zeroed before the step computes
    - dropped_grammars: slots whose requests had a grammar and are gone; some may have new ones
    - drafts: None if SlotDrafts does not change
    """

    slots: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    columns: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    pages: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    admitted: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    fields: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    adapter_slots: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    logit_edits: tuple[RequestLogitEdits, ...] = ()
    pages_to_zero: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    dropped_grammars: tuple[int, ...] = ()
    drafts: DraftDelta | None = None


NO_CHANGES = StepDelta()


@dataclass(frozen=True)
class Sampled:
    """The tokens that a step sampled, for its L rows of logits, in their order.

    Attributes:
    - num_sampled: int32 [L], how many tokens each row gave
    - ids: int32 [the sum of num_sampled], row after row
    - bad: int32, ascending, rows whose logits have no finite maximum or a NaN; they gave no token
    - logprobs: row after row, log-probs (wire.py) of the ids of rows that ask for them, and float32
      vectors of rows that ask for vectors
    - prompt_logprobs: log-probs of each of the step's `prompt_logprob_chunks`
    - refused: by row, why the row's grammar allowed nothing; such rows gave no token either
    - mask_units: by row, cost of one mask in units (grammars/compiling.py), if it was measured anew
      and is high, or was
    """

    num_sampled: np.ndarray
    ids: np.ndarray
    bad: np.ndarray = field(default_factory=lambda: EMPTY_INT32)
    logprobs: bytes = b""
    prompt_logprobs: tuple[bytes, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict[int, str])
    mask_units: Mapping[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, drawn: np.ndarray, refused: Mapping[int, str] | None = None) -> Sampled:
        """Makes a Sampled of a sampler's output `drawn`, integers [L, 2]: of each row the number of
        tokens it gave, and the id. The number is 1, or 0 for a bad row, or REJECTED for a row after
        a draft token that was rejected; the id means nothing in the last two cases.

        - refused: by row, why its grammar allowed nothing
        """
        counts, ids = drawn.astype(np.int32).T
        if not refused and (counts == 1).all():  # nearly always, and once a step
            return cls(counts, ids)
        counts, refused = counts.copy(), refused or {}
        counts[list(refused)] = 0
        bad = counts == 0
        bad[list(refused)] = False
        counts[counts == REJECTED] = 0
        bad_rows = np.flatnonzero(bad).astype(np.int32)
        return cls(counts, ids[counts > 0], bad_rows, refused=refused)

    def followed_by(self, forced: Mapping[int, Sequence[int]]) -> Sampled:
        """A copy with the ids `forced` {row: ids} after those of their rows, which have no
        log-probs."""
        counts, ends = self.num_sampled.copy(), np.cumsum(self.num_sampled)
        positions, ids = list[int](), list[int]()
        for row, row_ids in forced.items():
            counts[row] += len(row_ids)
            positions += [int(ends[row])] * len(row_ids)
            ids += row_ids
        return replace(self, num_sampled=counts, ids=np.insert(self.ids, positions, ids))

    @classmethod
    def one_each(cls, ids: Sequence[int] | np.ndarray) -> Sampled:
        """A Sampled with one token of each row; ids: any integers [L]."""
        return cls(np.ones(len(ids), dtype=np.int32), np.asarray(ids, dtype=np.int32))


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefixes that decodes of a step share, int32 [decodes] each. A word packs two numbers: upper
    * PREFIX_UPPER + lower (PREFIX_UPPER of wire.py).

    Attributes:
    - leaders: upper is the index of the leader's row, lower the number of first pages that this row
      has in common with its leader, which may be itself; 0 if the row shares none
    - ranks: upper is the row's number among the rows with its leader, from 0, lower the number of
      these rows, at least two
    """

    leaders: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class Step:
    """A step on the host: made of `Rows` (memory/manager.py), and the source of a DeviceStep
    (kernels/interface.py). Written by StepBuilder, read by Runner and the masks.

    R rows, T tokens, S rows that sample, L rows of logits: for each row that samples, in their
    order, one after its last known token, and with drafts one more after each draft token. So L is
    S in a step without drafts. Rows with one token come first. They are called decodes here, in
    StepShape and by attention, also if the token is the whole of a prompt's chunk: it is computed
    alike.

    Attributes:
    - epoch, number: of the plan
    - num_decodes: number of rows with one token, decodes and chunks of one token
    - slots, starts, counts: int32 [R]; row r computes positions starts[r] .. starts[r]+counts[r]-1,
      counts[r] >= 1
    - samples: bool [R], S of them True; the last position of such a row gives logits, and the
      sampled id goes to last_token[slots[r]]. A row with drafts gives logits at each of its
      positions
    - tokens: int32 [T], known ids, LAST_TOKEN or DRAFT_TOKEN (wire.py)
    - fields: sampling parameters of the rows of logits, [L] each, by name
      (engine/step_builder.py); steps of the same rows have the same object
    - penalties, logprobs, vectors: of the rows of logits whose requests ask for them; None: no row
      does
    - delta: applied first. Then position p of row r lies in page table[slots[r], p // page_size],
      at offset p % page_size. Page 0 is a dummy that no request owns
    - prompt_logprob_chunks: known tokens whose log-probs are asked for; the step computes the
      tokens before them
    - masked: rows of logits that grammars restrict; their masks are known only when the step before
      has ended. None: no row
    - shared_prefixes: None if attention shares no reads, or no decodes have a prefix in common
    - drafts: int32 [R], how many draft tokens a row verifies after its first token. Only the device
      knows the start of such a row and of each later row of its slot: starts[r] is the greatest
      possible start. NO_DRAFTS in all other rows; None if all rows are others
    - adapted: whether some row has an adapter
    """

    epoch: int
    number: int
    num_decodes: int
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray
    fields: Mapping[str, np.ndarray]
    penalties: PenaltyRows | None = None
    delta: StepDelta = NO_CHANGES
    logprobs: LogprobRows | None = None
    prompt_logprob_chunks: tuple[PromptLogprobChunk, ...] = ()
    masked: MaskRows | None = None
    shared_prefixes: SharedPrefixes | None = None
    vectors: VectorRows | None = None
    drafts: np.ndarray | None = None
    adapted: bool = False

    @property
    def verifies(self) -> bool:
        """Whether any row has draft tokens."""
        return self.drafts is not None and bool((self.drafts > 0).any())

    @property
    def num_logits(self) -> int:
        """L, the number of rows of logits: one for each row that samples, and one for each draft
        token."""
        count = int(np.count_nonzero(self.samples))
        return count if self.drafts is None else count + int(self.drafts.clip(min=0).sum())

    def logprob_sizes(self) -> np.ndarray | None:
        """Bytes of `Sampled.logprobs` for each id of a row of logits, int64 [L]; None if no row
        asks."""
        if self.logprobs is None and self.vectors is None:
            return None
        sizes = np.zeros(self.num_logits, dtype=np.int64)
        if self.logprobs is not None:
            sizes[self.logprobs.rows] = WORD * (LOGPROB_WORDS + 2 * self.logprobs.num_alternatives)
        if self.vectors is not None:
            sizes[self.vectors.rows] = WORD * self.vectors.sizes
        return sizes


if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionShape:
    """The attention heads of one rank.

    Attributes:
    - num_heads: query heads
    - num_kv_heads: heads of keys and values
    - head_dim: numbers of each head
    - scale: factor of scores, before softmax
    - sliding_window: tokens that a query attends to, itself included; None: all
    - sinks: [num_heads], each head's score of a key that every query attends to and that has no
      value
    - soft_cap: scaled scores become soft_cap * tanh(score / soft_cap); None: unchanged
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)
    soft_cap: float | None = None

"""What lies on a device of a step and by slot: what the kernels around a model read and write.

Knows rows, slots and pages as tensors; no request, no kernel and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

NO_LOGITS = -(2**31)  # in DeviceStep.logits_rows: nothing is sampled behind the row
NO_SLOT = -1  # in DeviceStep.slot_mapping: keys and values of this token are not kept
NO_LOGIT_KEY = -(2**63)  # in a record of scores: no id is there
GREEDY_BELOW = 1e-5  # such a temperature is greedy, as in vLLM


@dataclass(frozen=True, order=True)
class GraphShape:
    """The size of steps: `tokens` of all rows, `decodes` rows of one token, `prefills` of more.
    Of a CUDA graph it is the capacity. shares: what decodes begin with in common is read once, by
    kernels that others need not take."""

    tokens: int
    decodes: int
    prefills: int
    shared_prefix: bool = False

    @property
    def rows(self) -> int:
        """Decode rows, then prefill rows."""
        return self.decodes + self.prefills


@dataclass(frozen=True)
class DeviceStep:
    """A step on the device: views, of one shape, of buffers at fixed addresses.

    The last of four descriptions of a step: Plan (messages.py), Rows (memory/rows.py), Step
    (step.py), DeviceStep. R rows, T tokens, P prefill rows and S rows of logits are
    capacities: in a graph some are padding. Everything is written on the forward stream and read by
    kernels alone, except by attention backends of the CPU. What the host uploads, int32, as
    step_buffers.py lays it out and packs it:

    num_changes [1], changes [2n]: so many pairs (index, value) of what changes in SlotState.words
    before. slots, starts, counts [R]: as in Step; a padding row has the padding slot, which is the
    last one, start 0 and count 0. logits_rows [R]: which row of logits is the row's; -1 - s: row s
    is a padding row; NO_LOGITS: none. Together they name each once. tokens [T]: known ids, -1 for
    last_token[slot]. prefix_leaders, prefix_ranks [R]: as in Step.shared_prefixes, in shapes that
    share.

    What Kernels.expand makes of them, and of what lies by slot:

    input_ids, positions, slot_mapping int64 [T]: slot_mapping is page * page_size + offset; tokens
    past the last row's, and of padding rows, are id 0 at position 0 in NO_SLOT. qo_indptr int32
    [R + 1]: where each row's tokens begin. prefill_qo_indptr int32 [P + 1]: the same of prefill
    rows, less `query_base`. seq_lens, last_page_len int32 [R]: tokens of a row after the step, and
    in its last page. kv_indptr int32 [R + 1], kv_indices int32: a row's pages begin at
    kv_indices[kv_indptr[r]]; `lists_pages`: row after row, else kv_indices is the whole page table
    of all slots. block_table int32 [n, pages]: pages of the last n rows, for backends that want
    them by row. logits_indices int64 [S]: the token that a row of logits is computed from.
    write_slots, sample_positions int64 [S]: where the sampled id goes in last_token, and its
    position. sampling_words int32: fields of the rows of logits, as BySlot's.

    padded: a graph's, whose rows may be padding. sampling: sampling tensors [S] by name, views of
    sampling_words, write_slots and sample_positions.
    """

    shape: GraphShape
    padded: bool
    num_changes: torch.Tensor
    changes: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    logits_rows: torch.Tensor
    tokens: torch.Tensor
    prefix_leaders: torch.Tensor | None
    prefix_ranks: torch.Tensor | None
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    qo_indptr: torch.Tensor
    prefill_qo_indptr: torch.Tensor
    seq_lens: torch.Tensor
    last_page_len: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    block_table: torch.Tensor
    logits_indices: torch.Tensor
    write_slots: torch.Tensor
    sample_positions: torch.Tensor
    sampling_words: torch.Tensor
    sampling: Mapping[str, torch.Tensor]
    lists_pages: bool = False

    @property
    def num_logits(self) -> int:
        """S: rows of logits."""
        return len(self.logits_indices)

    @property
    def logits_of_every_token(self) -> bool:
        """Whether each token has the row of logits of its number: in graphs of decodes."""
        return self.padded and not self.shape.prefills

    @property
    def padding_row_tokens(self) -> int:
        """Tokens and keys of a padding row: 1 in a step of decodes, which all have one; 0 beside
        prompts, where it must not read or write anything."""
        return int(not self.shape.prefills)

    @property
    def prefill_query_base(self) -> int:
        """The token from which prefill_qo_indptr counts: of a graph the first one, because how many
        decode rows are real changes from replay to replay; else the first one behind the decodes.
        """
        return 0 if self.padded else self.shape.decodes

    def qo_indptr_of(self, begin: int, end: int) -> torch.Tensor:
        """[end - begin + 1], where queries of rows begin..end-1 begin, which are the decodes or all
        the others."""
        return self.qo_indptr[: end + 1] if begin == 0 else self.prefill_qo_indptr

    def block_table_of(self, begin: int, end: int) -> torch.Tensor:
        """int32 [end - begin, pages]: block_table of rows begin..end-1."""
        missing = len(self.seq_lens) - len(self.block_table)
        return self.block_table[begin - missing : end - missing]


@dataclass(frozen=True)
class SlotTables:
    """What lies on the device by slot; the last slot is the padding slot.

    table: int32 [slots, P]. fields: int32 words, field after field, `wide` of two words a slot and
    then `narrow` of one. last_token: int64 [slots].
    """

    page_table: torch.Tensor
    sampling_words: torch.Tensor
    last_token: torch.Tensor
    num_wide: int
    num_narrow: int


# In front of a slot's words in BansBySlot: how many sequences there are, where the output begins,
# how many tokens were known when its request was admitted, and the ids of the longest sequence.
BAD_WORDS_HEADER = 4


@dataclass(frozen=True)
class SlotBadWords:
    """Sequences of ids that a slot's output must not have. words: int32 [slots, n], in each

    | BAN_HEAD | recent ids | 0, ends of sequences | ids, sequence after sequence |

    recent: how many of the output's last ids are kept, a power of two; the one at position p is at
    p % recent. sequences: as many have room. last_token: int64 [slots], as BySlot's.
    """

    words: torch.Tensor
    history: int
    max_sequences: int
    last_token: torch.Tensor


@dataclass(frozen=True)
class SlotLogitBias:
    """int32. counts: [slots], how many edits a slot has; below 0, as many as it would be above, and
    no other id is sampled. words: [3, slots, most]: ids, which differ in a slot; the bits of the
    float32 that is added to the id's logit; and the position before which the id is not sampled.
    """

    counts: torch.Tensor
    words: torch.Tensor
    bad_words: SlotBadWords


# Sampling tensors of S rows of logits, by name: the fields of engine/step_builder.py, a seed as the
# bits of the uint64; sample_positions, write_slots: int64.
SamplingTensors = Mapping[str, torch.Tensor]


class Kernels(Protocol):
    """All on the current stream and without a synchronisation; grids depend on capacities only."""

    def scatter_words(
        self, pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor, /
    ) -> None:
        """words[index] = value for the first `count` int32 [1] of the (index, value) in `pairs`,
        int32 [2n], of which no two have one index and different values."""
        ...

    def prepare_inputs(self, step: DeviceStep, held: SlotTables, page_size: int, /) -> None:
        """Fills what DeviceStep says from what was uploaded of the step and lies in its slots."""
        ...

    def apply_logit_bias(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
        edits: SlotLogitBias, first_id: int, values: bool, /,
    ) -> None:  # fmt: skip
        """Changes logits [S, ids], those from `first_id` on, in place; slots, positions int64 [S].

        First, unless `values`, the last token of slots with bans joins their recent ids, if it was
        sampled there. values: also add what edits add, to logits of float32. In fewer bits, ids
        that were raised as much as each other would be equal: near 100, bfloat16 counts in halves.
        """
        ...

    def apply_token_bitmask(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first_id: int, /
    ) -> None:
        """Makes -inf, in place, of the logits [S, ids], those from `first_id` on, of `rows` int64
        [N] what their masks forbid: words int32 [N, W], a bit for each id, the lowest first, 1 for
        those that are allowed. Ids without a bit are forbidden."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        last_token: torch.Tensor,
        truncate: bool,
        /,
    ) -> torch.Tensor:
        """int64 [S, 2], of each row how many tokens it gave and which, from logits [S, vocab]; ids
        also go to last_token at `write_slots`. A row with a NaN, or whose maximum is not finite,
        gives none, and its id is 0. truncate False promises that no row has top-k, top-p or min-p.
        """
        ...

    def local_argmax(
        self, logits: torch.Tensor, sampling: SamplingTensors, first_id: int, /
    ) -> torch.Tensor:
        """What a rank offers for rows of logits [S, share], those of ids `first_id` and following:
        one row of numbers each, which only `choose` reads. For rows that nothing truncates.
        """
        ...

    def global_argmax(
        self, offers: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor, /
    ) -> torch.Tensor:
        """As `sample`, from the offers of all ranks [ranks, S, ...]; of equal scores the lowest
        id."""
        ...

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, most: int, /) -> torch.Tensor:
        """int32 [N, 2 + 2 most]: the scores (pipeinfer/logprobs.py) of `ids` int64 [N], each with
        `most` alternatives, up to 20, from logits [N, vocab]. Sums are float32. Of equal logits the
        lowest id is the likeliest."""
        ...

    def logit_keys(self, logits: torch.Tensor, ids: torch.Tensor, first_id: int, /) -> torch.Tensor:
        """int64 [N]: each of `ids` int64 [N] with its logit as one number, which orders them as
        their logits do, and of equal ones the lowest id highest; tables.NO_KEY for those that are
        not among logits [N, share] of the ids from `first_id` on."""
        ...

    def local_topk(
        self, logits: torch.Tensor, own: torch.Tensor, most: int, first_id: int, /
    ) -> torch.Tensor:
        """int64 [N, 2 + most], what a rank says of its share: the bits of float32
        log(sum(exp(logit))), how many ids are above `own` [N], keys, and the `most` greatest keys,
        falling."""
        ...

    def merge_topk(self, records: torch.Tensor, own: torch.Tensor, /) -> torch.Tensor:
        """As `scores`, of the ids of `own` keys, from what all ranks have said, int64
        [ranks, N, 2 + most]."""
        ...

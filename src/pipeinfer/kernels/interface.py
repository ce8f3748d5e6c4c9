"""Computation around a model on a device: the tensors of a step and of slots, and the kernels.

`Kernels` has thirteen functions. `kernels.host` has them in NumPy, `kernels.by_triton` for GPUs;
each is a module that fits the protocol. Uses tensors; no request, no model and no attention. Needs
no triton.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch

NO_LOGITS = -(2**31)  # in DeviceStep.logits_rows: nothing is sampled after this row
NO_KV_LOCATION = -1  # in DeviceStep.slot_mapping: the keys and values of this token are not stored
NO_LOGIT_KEY = -(2**63)  # among packed logit keys: no id has this place
GREEDY_BELOW = 1e-5  # temperatures below are greedy, as in vLLM
MAX_NGRAM = 4  # last tokens of a request that are looked for in its earlier tokens


@dataclass(frozen=True, order=True)
class StepShape:
    """The size of a step, and the capacity of a CUDA graph.

    Attributes:
    - num_tokens: tokens of all rows
    - num_decodes: rows of one token, which may also be a prompt's chunk
    - num_prefills: rows of more tokens
    - shared_prefix: decode rows with a common prefix read it once; this takes kernels that other
      steps need not run
    - verifies: a graph of steps that verify draft tokens, in which token t has row t of the logits
    """

    num_tokens: int
    num_decodes: int
    num_prefills: int
    shared_prefix: bool = False
    verifies: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows: decode rows, then prefill rows."""
        return self.num_decodes + self.num_prefills


@dataclass(frozen=True)
class DeviceStep:
    """A step on the device: views, of one shape, of buffers at fixed addresses.

    The last of four descriptions of a step: Plan (messages.py), Rows (memory/manager.py), Step
    (step.py), DeviceStep. R rows, T tokens, P prefill rows and L rows of logits are capacities: in
    a graph some are padding, so each may exceed the Step's.

    All tensors are written on the forward stream (CudaDevice.stream, machine.py: the stream to
    which the work of steps is submitted). Kernels alone read them, except that attention backends
    of the CPU read them, too. They are read on the forward stream, and, in graphs with decode rows
    and prefill rows, also by the attention of prefill rows on a stream of its own, which the
    forward stream waits for in each layer (PagedBackend, attention/interface.py).

    Attributes:
    - shape: R, T and P
    - padded: whether the step runs in a graph, so that rows may be padding

    Uploaded by the host, int32, as step_buffers.py lays it out and packs it:
    - num_changes [1], changes [2 n]: the first num_changes pairs (index, value) are written into
      SlotState.words before anything else
    - slots, starts, counts [R]: as in Step. A padding row has the padding slot (the last one),
      start 0 and count 0. A start below 0 stands for SlotDrafts.lengths[slot]
    - logits_rows [R]: for row r a number s >= 0: the first row of logits of row r. If row r has a
      start below 0 and several tokens, s belongs to its first token, and the rows of logits of its
      other tokens follow. -1 - s: row r, be it padding or a row that samples nothing, marks row s
      of the logits as padding (in a graph with more rows of logits than the Step has). NO_LOGITS:
      neither. Each row of logits is named once; in a graph that verifies draft tokens the rows of
      logits of padding tokens are named by no row, and are padding
    - tokens [T]: known ids; -1 stands for last_token[slot], -2 for the slot's draft tokens, in
      their order
    - prefix_leaders, prefix_ranks [R]: as in Step.shared_prefixes; None in shapes without
      shared_prefix

    Written by Kernels.prepare_inputs, from the uploaded tensors and from SlotTables:
    - input_ids, positions: int64 [T]; padding tokens are id 0 at position 0
    - slot_mapping: int64 [T], page * page_size + offset in the KV cache; NO_KV_LOCATION for padding
    - qo_indptr: int32 [R + 1], the first token of each row
    - prefill_qo_indptr: int32 [P + 1], the first token of each prefill row, less
      `prefill_query_base`
    - seq_lens: int32 [R], tokens of a row after the step
    - last_page_len: int32 [R], tokens in a row's last page; page_size for a row without tokens
    - kv_indptr: int32 [R + 1]; a row's pages begin at kv_indices[kv_indptr[r]]; the last number
      counts only if `lists_pages`
    - kv_indices: int32, pages row after row if `lists_pages`, else the page table of all slots
    - row_page_table: int32 [n, pages], the page table of the last n rows, for backends that want
      pages by row: all rows, the prefill rows, or no rows (BackendCapabilities.page_table)
    - logits_indices: int64 [L], the token from which a row of logits is computed
    - write_slots: int64 [L], the slot of last_token that gets the sampled id
    - sample_positions: int64 [L], the position of the sampled id
    - sampling_words: int32, the words of SlotTables.sampling_words, by row of logits
    - sampling: sampling tensors [L] by name, views of write_slots, sample_positions and
      sampling_words
    """

    shape: StepShape
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
    row_page_table: torch.Tensor
    logits_indices: torch.Tensor
    write_slots: torch.Tensor
    sample_positions: torch.Tensor
    sampling_words: torch.Tensor
    sampling: Mapping[str, torch.Tensor]
    lists_pages: bool = False

    @property
    def num_logits(self) -> int:
        """L, the number of rows of logits."""
        return len(self.logits_indices)

    @property
    def logits_of_every_token(self) -> bool:
        """Whether token t has row t of the logits: in graphs of decodes, and in graphs that verify
        draft tokens.
        """
        return self.padded and (self.shape.verifies or not self.shape.num_prefills)

    @property
    def padding_row_tokens(self) -> int:
        """Tokens and keys of a padding row: 1 in a step of decodes, whose rows all have one; 0
        beside prompts, where a padding row must not read or write anything.
        """
        return int(not self.shape.num_prefills)

    @property
    def prefill_query_base(self) -> int:
        """The token from which prefill_qo_indptr counts: the first token of a graph, because the
        number of real decode rows changes from replay to replay; else the first token after the
        decode rows.
        """
        return 0 if self.padded else self.shape.num_decodes

    def page_table_of(self, begin: int, end: int) -> torch.Tensor:
        """Returns int32 [end - begin, pages], the page table of rows begin .. end - 1."""
        missing = len(self.seq_lens) - len(self.row_page_table)
        return self.row_page_table[begin - missing : end - missing]


@dataclass(frozen=True)
class SlotTables:
    """Tables by slot on the device, which kernels read; the last slot is the padding slot.

    Attributes:
    - page_table: int32 [slots, pages]
    - sampling_words: int32, field after field: `num_wide` fields of two words a slot, then
      `num_narrow` fields of one word
    - last_token: int64 [slots], the id that was sampled last
    - drafts: state of speculative decoding; None: no drafts are made
    """

    page_table: torch.Tensor
    sampling_words: torch.Tensor
    last_token: torch.Tensor
    num_wide: int
    num_narrow: int
    drafts: SlotDrafts | None = None


@dataclass(frozen=True)
class SlotDrafts:
    """State of speculative decoding by slot on the device; the last slot is the padding slot.

    Attributes:
    - lengths: int32 [slots], tokens of the request that are computed and confirmed; the request has
      one token more. Undefined for requests whose drafts were never verified
    - token_ids: int32 [slots, n], prompt and output, as far as they are known
    - drafts: int32 [slots, k], draft tokens of the current step
    - acceptance: below 0: a draft token is accepted if it equals the sampled token. From 0 on
      (benchmarks): draft tokens are accepted at this rate, by a hash of position and slot
    """

    lengths: torch.Tensor
    token_ids: torch.Tensor
    drafts: torch.Tensor
    acceptance: float = -1.0


# Words before all others in a slot's row of SlotBadWords: the number of sequences, the position at
# which the output begins, the tokens known when the request was admitted, and the ids of the
# longest sequence.
BAD_WORDS_HEADER = 4


@dataclass(frozen=True)
class SlotBadWords:
    """Sequences of ids that a slot's output must not have ("bad words").

    Attributes:
    - words: int32 [slots, n]; in each row

        | header: BAD_WORDS_HEADER | history | 0, ends of sequences | ids, sequence by sequence |

    - history: number of the latest output ids that are kept, a power of two; the id at position p
      is at p % history
    - max_sequences: sequences that a row has room for
    - last_token: int64 [slots], that of SlotTables
    """

    words: torch.Tensor
    history: int
    max_sequences: int
    last_token: torch.Tensor


@dataclass(frozen=True)
class SlotLogitEdits:
    """The logit edits of each slot: bias, suppressed ids, allowed ids and bad words.

    Attributes:
    - counts: int32 [slots], entries of a slot; below 0: -counts entries, and only their ids may be
      sampled (allowed ids)
    - words: int32 [3, slots, max_entries]: the id, which differs from all others of the slot; the
      bits of the float32 bias; the position before which the id is not sampled (suppressed)
    - bad_words: see SlotBadWords
    """

    counts: torch.Tensor
    words: torch.Tensor
    bad_words: SlotBadWords


# Sampling tensors [L] of the rows of logits, by name: the fields of engine/step_builder.py (a seed
# as the bits of the uint64), and sample_positions and write_slots, int64.
SamplingTensors = Mapping[str, torch.Tensor]


class LowRankMatrices(NamedTuple):
    """Low-rank adapters of one layer, by adapter slot.

    Attributes:
    - a: [adapter slots, modules * rank, in]
    - b: [adapter slots, out, rank]
    - parts: where each module's rows are in the layer's product
    """

    a: torch.Tensor
    b: torch.Tensor
    parts: tuple[slice, ...]


class Kernels(Protocol):
    """Computation of a device before and after the model: expands a step's inputs, edits and masks
    logits, samples, and computes log-probs. Attention, products and experts are elsewhere.

    All functions work on the current stream and without synchronisation; grids depend on capacities
    only. If a rank has a shard of the vocabulary, logits [L, shard] are those of the ids from
    `first_id` on.
    """

    def scatter_words(
        self, pairs: torch.Tensor, count: torch.Tensor, words: torch.Tensor, /
    ) -> None:
        """Writes words[index] = value, for the first `count` pairs (index, value).

        - pairs: int32 [2 n]; no two have one index and different values
        - count: int32 [1], number of valid pairs
        - words: int32
        """
        ...

    def prepare_inputs(self, step: DeviceStep, slot_tables: SlotTables, page_size: int, /) -> None:
        """Writes the prepared arrays of `step` (the second half of DeviceStep's attributes) from
        its uploaded arrays and from `slot_tables`.
        """
        ...

    def propose_ngrams(self, step: DeviceStep, slot_tables: SlotTables, /) -> None:
        """Writes SlotDrafts.drafts of each row of `step` with a start below 0 and several tokens:
        the tokens that followed an earlier occurrence of the request's last tokens, of at most
        MAX_NGRAM. The longest occurrence counts, and of several the latest. After the known tokens'
        end, and without any occurrence, the draft is the last token, repeated. To be called before
        prepare_inputs.
        """
        ...

    def accept_drafts(
        self, step: DeviceStep, drawn: torch.Tensor, slot_tables: SlotTables, /
    ) -> None:
        """For each row of `step` with a start below 0, accepts draft tokens as long as they equal
        the tokens sampled in their place. Writes lengths, token_ids and last_token of the row's
        slot, and REJECTED (wire.py) as the number of tokens of rows of logits after a rejected
        draft token. The tokens that other rows have sampled are added to token_ids of their slots.

        - drawn: int64 [L, 2], the return value of `sample` for this step; numbers of tokens change
        """
        ...

    def apply_logit_edits(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
        edits: SlotLogitEdits, first_id: int, add_bias: bool, /,
    ) -> None:  # fmt: skip
        """Sets the logits of ids that a slot must not sample to -inf, in place; with add_bias also
        adds the slot's bias to the others.

        Called in each step without add_bias; this call writes `edits.bad_words`: the last token of
        slots with bad words is added to their history, if it was sampled in this slot. Called again
        with add_bias if some row's logits are raised or lowered; this call writes no history.

        - logits: [L, shard]; float32 if add_bias. In bfloat16, which counts in halves near 100, ids
          with the same bias would become equal
        - slots, positions: int64 [L], of each row of logits
        """
        ...

    def apply_token_bitmask(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first_id: int, /
    ) -> None:
        """Sets forbidden logits to -inf, in place.

        - logits: [L, shard]
        - rows: int64 [N], the rows of logits that have a mask
        - words: int32 [N, W], a bit for each id of the vocabulary, the lowest first: 1 is allowed.
          Ids without a bit are forbidden
        """
        ...

    def sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        last_token: torch.Tensor,
        truncate: bool,
        /,
    ) -> torch.Tensor:
        """Samples; returns int64 [L, 2], the number of tokens of each row, and the sampled id.

        - logits: [L, vocab]
        - sampling: fields of each row
        - last_token: int64 [slots]; gets the ids at `write_slots`
        - truncate: False ignores top-k, top-p and min-p. A CUDA graph samples so; if a row has one
          of them, the step is sampled again

        A row with a NaN, or whose maximum is not finite, gives 0 tokens, and its id is 0.
        """
        ...

    def local_argmax(
        self, logits: torch.Tensor, sampling: SamplingTensors, first_id: int, /
    ) -> torch.Tensor:
        """Returns [L, n], a rank's best candidate for each row of logits [L, shard], with the rows'
        sampling noise; for rows without top-k, top-p and min-p. Only `global_argmax` reads the
        candidates.
        """
        ...

    def global_argmax(
        self, candidates: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor, /
    ) -> torch.Tensor:
        """Samples as `sample` does, from the candidates [ranks, L, n] of all ranks; for equal
        scores the lowest id.
        """
        ...

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, num_top: int, /) -> torch.Tensor:
        """Returns int32 [N, 2 + 2 num_top], the log-prob records (pipeinfer/wire.py) of `ids`, each
        with `num_top` alternatives.

        - logits: [N, vocab]. Sums are float32; of equal logits the lowest id is the likeliest
        - ids: int64 [N]
        - num_top: number of the likeliest ids beside each id, up to 20
        """
        ...

    def logit_keys(self, logits: torch.Tensor, ids: torch.Tensor, first_id: int, /) -> torch.Tensor:
        """Returns int64 [N], packed logit keys: one number of a logit and its id, larger for the
        larger logit, and of equal logits for the lower id; NO_LOGIT_KEY for ids outside of this
        shard.

        - logits: [N, shard]
        - ids: int64 [N]
        """
        ...

    def local_topk(
        self, logits: torch.Tensor, token_keys: torch.Tensor, num_top: int, first_id: int, /
    ) -> torch.Tensor:
        """Returns int64 [N, 2 + num_top], a rank's record: the bits of float32 logsumexp(logits),
        the number of keys above the row's own, and the greatest keys, falling.

        - logits: [N, shard]
        - token_keys: int64 [N], of `logit_keys`
        """
        ...

    def merge_topk(self, records: torch.Tensor, token_keys: torch.Tensor, /) -> torch.Tensor:
        """Returns the records of `logprobs`, from the records int64 [ranks, N, 2 + num_top] of all
        ranks.

        - token_keys: int64 [N], the greatest of all ranks' keys of each id
        """
        ...


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Returns a CPU tensor of the same shape and dtype in the array's memory. This function is the
    one place where torch's stubs leave an argument without a type.
    """
    return torch.from_numpy(array)


def lazy_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros of any size; on the CPU they take memory only where they are written.

    torch.zeros writes every byte (1.5 s for 1 GiB), and NumPy's zeros are written too if the C
    library has some megabytes to reuse; pages that the kernel maps are zero without being written.
    """
    count = prod(size) * dtype.itemsize
    if device.type != "cpu" or not count:
        return torch.zeros(size, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return tensor_of(np.frombuffer(mapped, np.uint8)).view(dtype).view(size)

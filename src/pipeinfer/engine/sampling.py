"""Sampling: hidden states to ids, on one rank that has all logits or on several that have a shard
each.

    Sampler      logits, and the sampled id of each row; LocalSampler and ShardedSampler
    Penalties    counts of ids by slot, and their effect on logits
    StepLogprobs log-probs of the ids that a step samples, and of prompt tokens, queued behind the
                 logits

No function waits for the device. Uses rows of parameters by name, and what ranks exchange; no
request and no device. The kernels are those of kernels/interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from pipeinfer.engine.step_buffers import Download
from pipeinfer.kernels.host import is_truncated
from pipeinfer.kernels.interface import Kernels, SamplingTensors, lazy_zeros, tensor_of
from pipeinfer.models.causal_lm import LanguageModel
from pipeinfer.step import (
    LogprobRows,
    PenaltyHistory,
    PenaltyRows,
    PromptLogprobChunk,
    Sampled,
    Step,
    VectorRows,
)
from pipeinfer.wire import LOGPROB_WORDS, logprob_bytes, narrow_logprobs


class Sampler(Protocol):
    """Computes ids from hidden states; `logits` are this rank's shard, which the other methods
    take.

    Attributes:
    - first_id: the id of the shard's first column
    - vocab: number of ids on all ranks together
    """

    first_id: int
    vocab: int

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """Returns logits [L, shard] of hidden states [L, hidden]."""
        ...

    def gather_logits(self, logits: torch.Tensor, /) -> torch.Tensor:
        """Returns logits [L, vocab]; all ranks must call it."""
        ...

    def masks(self, words: torch.Tensor, /) -> torch.Tensor:
        """Returns rank 0's masks int32 [N, W] on the device, whatever `words` of other ranks hold;
        all ranks must call it.
        """
        ...

    def sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        last_token: torch.Tensor,
        truncated: np.ndarray,
        /,
    ) -> torch.Tensor:
        """Samples; returns int64 [L, 2], number of tokens and id of each row, the same on all
        ranks. Ids are also written to last_token at `write_slots`. A row of bad logits gives no
        token. truncated: int64, the rows with top-k, top-p or min-p.
        """
        ...

    def logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, alternatives: int, /
    ) -> torch.Tensor:
        """Returns int32 [N, 2 + 2 alternatives], log-prob records of `ids` int64 [N] with
        `alternatives` each, from logits [N, shard] as the model gave them; all ranks must call it.
        """
        ...


class LocalSampler:
    """The Sampler of a single rank, whose model gives all logits."""

    first_id = 0

    def __init__(self, model: LanguageModel, kernels: Kernels, exact: bool = False) -> None:
        """Sampler of `model`. exact: see `_as_exact`."""
        self._exact = exact
        self.logits = model.logits
        self.vocab = model.vocab_shard.vocab_size
        self._kernels = kernels

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def masks(self, words: torch.Tensor) -> torch.Tensor:
        return words

    def sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        last_token: torch.Tensor,
        truncated: np.ndarray,
    ) -> torch.Tensor:
        truncate = len(truncated) > 0
        if truncate and self._exact:
            logits = _as_exact(logits)
        return self._kernels.sample(logits, sampling, last_token, truncate)

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, alternatives: int) -> torch.Tensor:
        return self._kernels.logprobs(logits, ids, alternatives)


def _as_exact(logits: torch.Tensor) -> torch.Tensor:
    """Returns float32 logits, as in steps in which some row has a bias or a penalty: the sums of
    top-p have another order in other dtypes, so exact mode uses one dtype.
    """
    return logits.to(torch.float32)


class Ranks(Protocol):
    """Exchange between ranks; see collectives.py."""

    def all_gather_stacked(self, partial: torch.Tensor) -> torch.Tensor:
        """Returns [size, ...], `partial` of every rank."""
        ...

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """Returns [..., n * size], [..., n] of every rank side by side."""
        ...

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `values`, replaced in place by those of rank 0."""
        ...


class ShardedSampler:
    """The Sampler of a rank whose model gives the logits of a shard of the vocabulary.

    Ranks exchange a few numbers for each row; for truncated rows they exchange all logits, too.
    """

    def __init__(
        self, model: LanguageModel, ranks: Ranks, kernels: Kernels, exact: bool = False
    ) -> None:
        """Sampler of this rank's shard of `model`. exact: see `_as_exact`."""
        self._exact = exact
        rows = model.vocab_shard
        self.logits = model.local_logits
        self.first_id = rows.start
        self._num_ids = rows.stop - rows.start
        self.vocab = rows.vocab_size
        self._ranks = ranks
        self._kernels = kernels

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_gather(logits)[:, : self.vocab]

    def masks(self, words: torch.Tensor) -> torch.Tensor:
        return self._ranks.broadcast(words)

    def sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        last_token: torch.Tensor,
        truncated: np.ndarray,
    ) -> torch.Tensor:
        local = self._kernels.local_argmax(logits[:, : self._num_ids], sampling, self.first_id)
        drawn = self._kernels.global_argmax(
            self._ranks.all_gather_stacked(local), sampling, last_token
        )
        if len(truncated):
            indices = _on_device(truncated, logits.device)
            fields = {name: values[indices] for name, values in sampling.items()}
            gathered = self.gather_logits(logits[indices])
            if self._exact:
                gathered = _as_exact(gathered)
            drawn[indices] = self._kernels.sample(gathered, fields, last_token, True)
        return drawn

    def logprobs(self, logits: torch.Tensor, ids: torch.Tensor, alternatives: int) -> torch.Tensor:
        local = logits[:, : self._num_ids]
        return log_probs(
            self._kernels, local, ids, alternatives, self.first_id, self._ranks.all_gather_stacked
        )


def truncated(fields: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns int64 [K], which of the L rows of logits are sampled at random with top-k, top-p or
    min-p. fields: see Step.fields.
    """
    return np.flatnonzero(
        is_truncated(fields["temperature"], fields["top_k"], fields["top_p"], fields["min_p"])
    )


# (tensor) -> [ranks, ...]: the tensors of all ranks.
Collect = Callable[[torch.Tensor], torch.Tensor]


def log_probs(
    kernels: Kernels,
    logits: torch.Tensor,
    ids: torch.Tensor,
    alternatives: int,
    first_id: int,
    collect: Collect,
) -> torch.Tensor:
    """Returns the records of Kernels.logprobs, from logits [N, shard] of the ids from `first_id`
    on; equal on all ranks.
    """
    keys = collect(kernels.logit_keys(logits, ids, first_id)).amax(0)
    return kernels.merge_topk(
        collect(kernels.local_topk(logits, keys, alternatives, first_id)), keys
    )


ROWS_AT_ONCE = 32  # rows, so that intermediate tensors stay small
IN_PROMPT, IN_OUTPUT = 1, 2  # bits of a count: the lowest one, and all others


class Penalties:
    """Penalties on one rank, which has the logits of `ids`: int32 counts [slots, ids], allocated at
    the start, because all memory that is free later is given to KV pages. On a CPU they become real
    memory only for slots whose requests have penalties.
    """

    def __init__(self, slots: int, ids: range, device: torch.device | str) -> None:
        self._first_id = ids.start
        self._counts = lazy_zeros((slots, len(ids)), torch.int32, torch.device(device))

    @property
    def bytes(self) -> int:
        """Bytes of the counts."""
        return self._counts.nbytes

    def apply(
        self, logits: torch.Tensor, rows: PenaltyRows, unpadded_rows: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes logits float32 [L, ids and padding] in place, by the counts of earlier tokens.
        Returns int64 [N] each: which rows of `logits` have penalties, and their slots.

        - rows: the rows with penalties
        - unpadded_rows: int64, which rows of `logits` are the step's, in their order; None: the
          first ones
        """
        for history in rows.new:
            self._begin(history, self._counts[history.slot])
        indices = self._tensor(rows.rows if unpadded_rows is None else unpadded_rows[rows.rows])
        slots, factors = self._tensor(rows.slots), self._tensor(rows.factors)
        logits = logits[:, : self._counts.shape[1]]
        for begin in range(0, len(indices), ROWS_AT_ONCE):
            part = slice(begin, begin + ROWS_AT_ONCE)
            before, seen = logits[indices[part]], self._counts[slots[part]]
            logits[indices[part]] = penalized(before, seen, factors[part])
        return indices, slots

    def count(self, drawn: torch.Tensor, indices: torch.Tensor, slots: torch.Tensor) -> None:
        """Counts the sampled tokens of those rows of `drawn` int64 [L, 2]: number of tokens and id
        of each row. indices, slots: return values of `apply`.
        """
        produced, ids = drawn.to(self._counts.device)[indices].unbind(1)
        column = ids - self._first_id
        in_shard = (produced > 0) & (column >= 0) & (column < self._counts.shape[1])
        column = torch.where(in_shard, column, 0)
        self._counts[slots, column] += IN_OUTPUT * in_shard.int()  # no slot stands twice

    def _begin(self, history: PenaltyHistory, counts: torch.Tensor) -> None:
        """Sets `counts` int32 [ids] to those of one request."""
        counts.zero_()
        counts[self._columns(history.prompt, len(counts))] = IN_PROMPT
        output = self._columns(history.output, len(counts))
        counts.index_add_(0, output, torch.full_like(output, IN_OUTPUT, dtype=torch.int32))

    def _columns(self, ids: np.ndarray, width: int) -> torch.Tensor:
        """Returns int64, the columns of those `ids` int32 that this rank has."""
        column = ids.astype(np.int64) - self._first_id
        return self._tensor(column[(column >= 0) & (column < width)])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return _on_device(array, self._counts.device)


def penalized(logits: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Returns logits with penalties, float32 [n, ids], from logits float32 [n, ids], counts int32
    [n, ids] and factors float32 [n, 3].

    Finite logits stay finite, whatever the factors: only the model makes logits bad.
    """
    finite = logits.isfinite()
    repetition, frequency, presence = factors.chunk(3, dim=1)
    penalized_logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, penalized_logits, logits)
    outputs = counts // IN_OUTPUT
    changed = logits - frequency * outputs - presence * (outputs > 0)
    return torch.where(finite, changed.nan_to_num(), changed)


TOKENS_AT_ONCE = 64  # tokens of a prompt whose logits there are at a time


@dataclass(frozen=True)
class HostLogprobs:
    """The log-probs and vectors of one step on the host; complete when the step has ended.

    Attributes:
    - words: int32; first the records of `rows`, each with the largest number of alternatives of any
      row, then the vectors, each as long as the longest, then the records of `chunks`
    - rows: rows whose requests ask for log-probs of sampled ids; None: no row
    - vectors: rows whose requests ask for vectors; None: no row
    - chunks: prompt tokens whose log-probs are asked for
    """

    words: np.ndarray
    rows: LogprobRows | None
    vectors: VectorRows | None
    chunks: tuple[PromptLogprobChunk, ...]

    def added_to(self, sampled: Sampled) -> Sampled:
        """Returns `sampled` with log-probs and vectors."""
        offset, made = 0, b""
        if self.rows is not None:
            num_rows, width = len(self.rows.rows), _width(int(self.rows.num_alternatives.max()))
            offset = num_rows * width
            table = self.words[:offset].reshape(num_rows, width)
            gave = sampled.num_sampled[self.rows.rows] > 0
            made = _bytes(table if gave.all() else table[gave], self.rows.num_alternatives[gave])
        if self.vectors is not None:
            num_rows, width = len(self.vectors.rows), int(self.vectors.sizes.max())
            table = self.words[offset : offset + num_rows * width].reshape(num_rows, width)
            offset += num_rows * width
            made = self._with_vectors(made, table, sampled.num_sampled)
        prompts: list[bytes] = []
        for chunk in self.chunks:
            width = _width(chunk.num_alternatives)
            end = offset + len(chunk.ids) * width
            prompts.append(self.words[offset:end].tobytes())
            offset = end
        return replace(sampled, logprobs=made, prompt_logprobs=tuple(prompts))

    def _with_vectors(self, logprobs: bytes, table: np.ndarray, counts: np.ndarray) -> bytes:
        """Returns the log-prob records of rows, and the vectors int32 [N, words] of other rows, in
        the rows' order. counts: int32 [L], number of ids of each row.
        """
        assert self.vectors is not None
        parts, at = dict[int, bytes](), 0
        if self.rows is not None:
            rows, alternatives = self.rows.rows.tolist(), self.rows.num_alternatives.tolist()
            for row, count in zip(rows, alternatives, strict=True):
                end = at + int(counts[row]) * logprob_bytes(count)
                parts[row], at = logprobs[at:end], end
        for row, size, words in zip(
            self.vectors.rows.tolist(), self.vectors.sizes.tolist(), table, strict=True
        ):
            parts[row] = words[:size].tobytes() if counts[row] else b""
        return b"".join([parts[row] for row in sorted(parts)])


class StepLogprobs:
    """The log-probs and vectors of one step while the device computes it."""

    def __init__(self, step: Step, unpadded_rows: np.ndarray | None, sampler: Sampler) -> None:
        """Collector for `step`. unpadded_rows: which rows of logits are the step's, in their order;
        None: the first ones.
        """
        self._rows = step.logprobs
        self._vectors = step.vectors
        self._chunks = step.prompt_logprob_chunks
        self._unpadded_rows = unpadded_rows
        self._sampler = sampler
        self._raw: torch.Tensor | None = None
        self._words: list[torch.Tensor] = []  # records of prompts
        self._vector_words: list[torch.Tensor] = []
        self._row_words: list[torch.Tensor] = []

    @property
    def of_prompts(self) -> bool:
        """Whether logits of prompt tokens are needed, too."""
        return bool(self._chunks)

    def tokens(self, last: torch.Tensor) -> torch.Tensor:
        """Returns int64: `last`, the tokens after which the step samples, followed by the tokens of
        the prompts' chunks.
        """
        positions = [
            np.arange(chunk.at, chunk.at + len(chunk.ids), dtype=np.int64) for chunk in self._chunks
        ]
        return torch.cat((last, _on_device(np.concatenate(positions), last.device)))

    def add_prompts(self, hidden: torch.Tensor) -> None:
        """Computes the log-probs of the prompts' chunks, from the hidden states of their tokens."""
        begin = 0
        for chunk in self._chunks:
            ids = _on_device(chunk.ids.astype(np.int64), hidden.device)
            for first in range(0, len(ids), TOKENS_AT_ONCE):
                part = ids[first : first + TOKENS_AT_ONCE]
                logits = self._sampler.logits(hidden[begin : begin + len(part)])
                self._words.append(
                    self._sampler.logprobs(logits, part, chunk.num_alternatives).flatten()
                )
                begin += len(part)

    def add_vectors(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Keeps the vectors, from the hidden states [L, hidden] of the rows of logits, or from the
        logits [L, shard] as the model gave them.
        """
        asked = self._vectors
        if asked is None:
            return
        indices, count = self._indices_on(hidden.device, asked.rows), len(asked.rows)
        width = int(asked.sizes.max())
        if not any(map(len, asked.token_ids)):
            vectors = _chosen(hidden, indices, count)[:, :width].to(torch.float32)
        else:
            vectors = self._logits_of_ids(hidden, logits, indices, width)
        self._vector_words.append(vectors.contiguous().view(torch.int32).flatten())

    def _logits_of_ids(
        self, hidden: torch.Tensor, logits: torch.Tensor, indices: torch.Tensor | None, width: int
    ) -> torch.Tensor:
        """Returns float32 [N, width], the vectors of a step in which some rows ask for logits of
        ids.
        """
        assert self._vectors is not None
        token_ids = self._vectors.token_ids
        gathered = self._sampler.gather_logits(_chosen(logits, indices, len(token_ids)))
        states = _chosen(hidden, indices, len(token_ids))
        vectors = torch.zeros(len(token_ids), width, dtype=torch.float32, device=hidden.device)
        for row, ids in enumerate(token_ids):
            columns = _on_device(ids, hidden.device)
            values = gathered[row, columns] if len(ids) else states[row, :width]
            vectors[row, : len(values)] = values
        return vectors

    def add_outputs(self, logits: torch.Tensor) -> None:
        """Keeps the logits [L, shard] of the rows as the model gave them; the caller may change
        them afterwards.
        """
        if self._rows is not None:
            indices = self._indices_on(logits.device, self._rows.rows)
            self._raw = (
                logits[: len(self._rows.rows)].clone() if indices is None else logits[indices]
            )

    def add_sampled(self, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        """Computes the log-probs of the sampled ids.

        - logits: [L, shard] as the model gave them, unless `add_outputs` kept them
        - drawn: int64 [L, 2], number of tokens and id of each row
        """
        if self._rows is None:
            return
        rows = self._rows.rows
        indices, num_rows = self._indices_on(logits.device, rows), len(rows)
        raw = _chosen(logits, indices, num_rows) if self._raw is None else self._raw
        ids = _chosen(drawn[:, 1].to(logits.device), indices, num_rows)
        made = self._sampler.logprobs(raw, ids, int(self._rows.num_alternatives.max()))
        self._row_words.append(made.flatten())

    def download(self, buffer: Download) -> HostLogprobs:
        """Queues the copy to the host; the result is complete when the step has ended."""
        parts = [*self._row_words, *self._vector_words, *self._words]
        words = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        return HostLogprobs(buffer.download(words), self._rows, self._vectors, self._chunks)

    def _indices_on(self, device: torch.device, rows: np.ndarray) -> torch.Tensor | None:
        """Returns where the logits of `rows` int64 lie; None: they are the first ones, in order."""
        indices = rows if self._unpadded_rows is None else self._unpadded_rows[rows]
        if np.array_equal(indices, np.arange(len(indices))):
            return None
        return _on_device(indices, device)


def _chosen(table: torch.Tensor, indices: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """Returns the entries of `num_rows` rows of `table`; indices: see StepLogprobs._indices_on."""
    return table[:num_rows] if indices is None else table[indices]


def _bytes(table: np.ndarray, alternatives: np.ndarray) -> bytes:
    """Returns the bytes of records int32 [N, words], each cut to the number of alternatives that
    its row asked for. alternatives: [N].
    """
    if len(set(alternatives.tolist())) <= 1:
        return narrow_logprobs(table, int(alternatives.max(initial=0))).tobytes()
    return b"".join(
        narrow_logprobs(table[row : row + 1], count).tobytes()
        for row, count in enumerate(alternatives.tolist())
    )


def _width(alternatives: int) -> int:
    return LOGPROB_WORDS + 2 * alternatives


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies to the device. Memory that is not pinned has been read when this returns, but the copy
    itself waits for its turn on the stream.
    """
    return tensor_of(array).to(device, non_blocking=True)

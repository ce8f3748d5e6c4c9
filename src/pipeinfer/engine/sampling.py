"""From hidden states to ids, on one rank that has all logits or on several that have a part each.

    Sampler      logits, and what each row samples; LocalSampler and ShardedSampler
    Penalties    counts of ids by slot, and logits less what they cost
    StepLogprobs log-probs of what a step samples, and of prompt tokens, queued behind the logits

Nobody waits for the device. Knows rows of parameters by name, and what ranks exchange; no request
and no device. The kernels are those of kernels/interface.py.
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

NONE = np.empty(0, dtype=np.int64)  # rows


class Sampler(Protocol):
    """From hidden states to ids; `logits` are this rank's part of them, which the others take.

    first_id: the id of their first column. vocab: how many ids there are, on all ranks together.
    """

    first_id: int
    vocab: int

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """[L, hidden] to [L, share]."""
        ...

    def gather_logits(self, logits: torch.Tensor, /) -> torch.Tensor:
        """[L, vocab]; all ranks must call it."""
        ...

    def masks(self, words: torch.Tensor, /) -> torch.Tensor:
        """int32 [N, W], on the device: rank 0's `words`, whatever those of other ranks hold; all
        ranks must call it."""
        ...

    def sample(
        self,
        logits: torch.Tensor,
        sampling: SamplingTensors,
        last_token: torch.Tensor,
        truncated: np.ndarray,
        /,
    ) -> torch.Tensor:
        """int64 [L, 2], how many tokens each row gave and which, the same on all ranks; ids also go
        to last_token at `write_slots`. A row of bad logits gives none. truncated: int64, the rows
        with top-k, top-p or min-p.
        """
        ...

    def logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, alternatives: int, /
    ) -> torch.Tensor:
        """int32 [N, 2 + 2 alternatives]: log-probs of `ids` int64 [N], each with so many
        alternatives, from logits [N, share] that nothing has changed; all ranks must call it."""
        ...


class LocalSampler:
    """For one rank, whose model gives all logits."""

    first_id = 0

    def __init__(self, model: LanguageModel, kernels: Kernels, exact: bool = False) -> None:
        """exact: see `_as_exact`."""
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
    """float32, as a step has them in which some row has a bias or a penalty: the sums of top-p have
    another order in other dtypes, so exact mode has one."""
    return logits.to(torch.float32)


class Ranks(Protocol):
    """What ranks exchange; see collectives.py."""

    def all_gather_stacked(self, partial: torch.Tensor) -> torch.Tensor:
        """[size, ...]: `partial` of every rank."""
        ...

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """[..., n] of every rank, side by side: [..., n * size]."""
        ...

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, which become those of rank 0 in place."""
        ...


class ShardedSampler:
    """For a rank whose model gives the logits of a run of the vocabulary.

    A few numbers a row and rank are exchanged; of rows that are truncated all logits, too.
    """

    def __init__(
        self, model: LanguageModel, ranks: Ranks, kernels: Kernels, exact: bool = False
    ) -> None:
        """exact: see `_as_exact`."""
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
    """int64 [K], which of the L rows of logits are sampled at random with top-k, top-p or min-p.
    fields: see Step.fields."""
    return np.flatnonzero(
        is_truncated(fields["temperature"], fields["top_k"], fields["top_p"], fields["min_p"])
    )


# [ranks, ...]: what every rank has made.
Collect = Callable[[torch.Tensor], torch.Tensor]


def log_probs(
    kernels: Kernels,
    logits: torch.Tensor,
    ids: torch.Tensor,
    alternatives: int,
    first_id: int,
    collect: Collect,
) -> torch.Tensor:
    """As Kernels.logprobs, from logits [N, share] of the ids from `first_id` on; the same on all
    ranks."""
    keys = collect(kernels.logit_keys(logits, ids, first_id)).amax(0)
    return kernels.merge_topk(
        collect(kernels.local_topk(logits, keys, alternatives, first_id)), keys
    )


ROWS_AT_ONCE = 32  # rows, so that what is in between stays small
IN_PROMPT, IN_OUTPUT = 1, 2  # of a count: the lowest bit, and all others


class Penalties:
    """Of one rank, which has the logits of `ids`: int32 counts [slots, ids], allocated at once,
    because all memory that is free later is given to KV pages. On a CPU they become real memory
    only for slots whose requests have penalties."""

    def __init__(self, slots: int, ids: range, device: torch.device | str) -> None:
        self._first_id = ids.start
        self._counts = lazy_zeros((slots, len(ids)), torch.int32, torch.device(device))

    @property
    def bytes(self) -> int:
        """What the counts take."""
        return self._counts.nbytes

    def apply(
        self, logits: torch.Tensor, rows: PenaltyRows, unpadded_rows: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes logits float32 [L, ids and padding] in place, by what was said so far. Returns
        int64 [N] each: which of them are those of `rows`, and their slots.

        unpadded_rows: int64, which rows of `logits` are the step's, in their order; None: the first
            ones.
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
        """Counts the tokens of those rows of `drawn` int64 [L, 2]: how many each row gave, and
        which. indices, slots: as `apply` has returned them."""
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
        """int64: where those of `ids` int32 stand that this rank has."""
        column = ids.astype(np.int64) - self._first_id
        return self._tensor(column[(column >= 0) & (column < width)])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return _on_device(array, self._counts.device)


def penalized(logits: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """float32 [n, ids] of float32 [n, ids], counts int32 [n, ids] and factors float32 [n, 3].

    What is finite stays finite, whatever the factors: only the model makes logits bad.
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
    """The log-probs of one step, on the host; complete when the step has ended.

    words: int32, the log-probs of its rows, with as many alternatives each as the one that wants
    most, then vectors, as long as the longest each, then the log-probs of its prompts' chunks.
    rows, vectors, chunks: whose these are."""

    words: np.ndarray
    rows: LogprobRows | None
    vectors: VectorRows | None
    chunks: tuple[PromptLogprobChunk, ...]

    def added_to(self, sampled: Sampled) -> Sampled:
        """The same with log-probs."""
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
        """The log-probs of rows, and the vectors int32 [N, words] of others, in the rows' order.
        counts: int32 [L], how many ids each row gave."""
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
    """The log-probs of one step while the device computes it."""

    def __init__(self, step: Step, unpadded_rows: np.ndarray | None, sampler: Sampler) -> None:
        """unpadded_rows: which rows of logits are the step's, in their order; None: the first
        ones."""
        self._rows = step.logprobs
        self._vectors = step.vectors
        self._chunks = step.prompt_logprob_chunks
        self._unpadded_rows = unpadded_rows
        self._sampler = sampler
        self._raw: torch.Tensor | None = None
        self._words: list[torch.Tensor] = []  # of prompts
        self._vector_words: list[torch.Tensor] = []
        self._row_words: list[torch.Tensor] = []

    @property
    def of_prompts(self) -> bool:
        """Whether logits of prompts' tokens are needed, too."""
        return bool(self._chunks)

    def tokens(self, last: torch.Tensor) -> torch.Tensor:
        """int64: `last`, whose tokens are sampled behind, and those of the prompts' chunks."""
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
        """Keeps the vectors, out of the hidden states [L, hidden] of the rows of logits, or of the
        logits [L, share] as the model gave them."""
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
        """float32 [N, width]: as add_vectors, where some rows want logits."""
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
        """Logits [L, share] as the model gave them, which may be changed from now on."""
        if self._rows is not None:
            indices = self._indices_on(logits.device, self._rows.rows)
            self._raw = (
                logits[: len(self._rows.rows)].clone() if indices is None else logits[indices]
            )

    def add_sampled(self, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        """Computes the log-probs of what the rows have drawn, int64 [L, 2]. logits: [L, share] as
        the model gave them, unless they were kept."""
        if self._rows is None:
            return
        rows = self._rows.rows
        indices, num_rows = self._indices_on(logits.device, rows), len(rows)
        raw = _chosen(logits, indices, num_rows) if self._raw is None else self._raw
        ids = _chosen(drawn[:, 1].to(logits.device), indices, num_rows)
        made = self._sampler.logprobs(raw, ids, int(self._rows.num_alternatives.max()))
        self._row_words.append(made.flatten())

    def download(self, buffer: Download) -> HostLogprobs:
        """To the host; there when the step has ended."""
        parts = [*self._row_words, *self._vector_words, *self._words]
        words = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
        return HostLogprobs(buffer.download(words), self._rows, self._vectors, self._chunks)

    def _indices_on(self, device: torch.device, rows: np.ndarray) -> torch.Tensor | None:
        """Where the logits of `rows` int64 lie; None: they are the first ones, in order."""
        indices = rows if self._unpadded_rows is None else self._unpadded_rows[rows]
        if np.array_equal(indices, np.arange(len(indices))):
            return None
        return _on_device(indices, device)


def _chosen(table: torch.Tensor, indices: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """The entries of `num_rows` rows; `indices`: see StepLogprobs._indices_on."""
    return table[:num_rows] if indices is None else table[indices]


def _bytes(table: np.ndarray, alternatives: np.ndarray) -> bytes:
    """Of log-prob records int32 [N, words], each with the alternatives that its row asked for,
    `alternatives` [N]."""
    if len(set(alternatives.tolist())) <= 1:
        return narrow_logprobs(table, int(alternatives.max(initial=0))).tobytes()
    return b"".join(
        narrow_logprobs(table[row : row + 1], count).tobytes()
        for row, count in enumerate(alternatives.tolist())
    )


def _width(alternatives: int) -> int:
    return LOGPROB_WORDS + 2 * alternatives


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """What is copied from memory that is not pinned has been read when this returns, but the copy
    itself waits for its turn on the stream."""
    return tensor_of(array).to(device, non_blocking=True)

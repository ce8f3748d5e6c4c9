"""What a step says of its logits where requests ask for log-probs: queued behind what it computes.

Nobody waits for the device: what is uploaded is small and copied at once, and the scores go to the
host with the step's tokens. Knows rows and tokens; no request and no message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeinfer.engine.buffers import Download
from pipeinfer.engine.sampling import Sampler
from pipeinfer.logprobs import OWN_WORDS, narrowed
from pipeinfer.steps.step import LogprobRows, Sampled, ScoredChunk, Step
from pipeinfer.tensors import tensor_of

AT_ONCE = 64  # tokens of a prompt whose logits there are at a time


@dataclass(frozen=True)
class StepScores:
    """Of one step, once it has ended. `words`: the scores of its rows, with as many
    alternatives each as the one that wants most, then those of its prompts' chunks."""

    words: np.ndarray
    rows: LogprobRows | None
    chunks: tuple[ScoredChunk, ...]

    def beside(self, sampled: Sampled) -> Sampled:
        """The same with log-probs."""
        at, made = 0, b""
        if self.rows is not None:
            many, width = len(self.rows.rows), _width(int(self.rows.most.max()))
            at = many * width
            table = self.words[:at].reshape(many, width)
            gave = sampled.counts[self.rows.rows] > 0
            made = _bytes(table if gave.all() else table[gave], self.rows.most[gave])
        prompts: list[bytes] = []
        for chunk in self.chunks:
            width = _width(chunk.most)
            end = at + len(chunk.ids) * width
            prompts.append(self.words[at:end].tobytes())
            at = end
        return replace(sampled, logprobs=made, prompts=tuple(prompts))


class Scores:
    """Of one step on its way through the device."""

    def __init__(self, step: Step, entries: np.ndarray | None, sampler: Sampler) -> None:
        """entries: which row of logits belongs to each row that samples; None: the same."""
        self._rows = step.logprobs
        self._chunks = step.prompts
        self._entries = entries
        self._sampler = sampler
        self._raw: torch.Tensor | None = None
        self._words: list[torch.Tensor] = []

    @property
    def of_prompts(self) -> bool:
        """Whether logits of more than the rows that sample are needed."""
        return bool(self._chunks)

    def tokens(self, last: torch.Tensor) -> torch.Tensor:
        """int64: `last`, whose tokens are sampled behind, and those of the prompts' chunks."""
        at = [
            np.arange(chunk.at, chunk.at + len(chunk.ids), dtype=np.int64) for chunk in self._chunks
        ]
        return torch.cat((last, _there(np.concatenate(at), last.device)))

    def prompts(self, hidden: torch.Tensor) -> None:
        """From the hidden states of the prompts' tokens."""
        begin = 0
        for chunk in self._chunks:
            ids = _there(chunk.ids.astype(np.int64), hidden.device)
            for first in range(0, len(ids), AT_ONCE):
                some = ids[first : first + AT_ONCE]
                logits = self._sampler.logits(hidden[begin : begin + len(some)])
                self._words.append(self._sampler.score(logits, some, chunk.most).flatten())
                begin += len(some)

    def keep(self, logits: torch.Tensor) -> None:
        """Logits [S, share] as the model gave them, which may be changed from now on."""
        if self._rows is not None:
            at = self._at(logits.device)
            self._raw = logits[: len(self._rows.rows)].clone() if at is None else logits[at]

    def rows(self, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        """From what the rows have drawn, int64 [S, 2]. logits: [S, share] as the model gave them,
        unless they were kept."""
        if self._rows is None:
            return
        at, many = self._at(logits.device), len(self._rows.rows)
        raw = _chosen(logits, at, many) if self._raw is None else self._raw
        ids = _chosen(drawn[:, 1].to(logits.device), at, many)
        made = self._sampler.score(raw, ids, int(self._rows.most.max()))
        self._words.insert(0, made.flatten())

    def download(self, room: Download) -> StepScores:
        """To the host; there when the step has ended."""
        words = torch.cat(self._words) if self._words else torch.empty(0, dtype=torch.int32)
        return StepScores(room.download(words), self._rows, self._chunks)

    def _at(self, where: torch.device) -> torch.Tensor | None:
        """Where the logits of the rows lie; None: they are the first ones, in order."""
        assert self._rows is not None
        rows = self._rows.rows
        at = rows if self._entries is None else self._entries[rows]
        return None if np.array_equal(at, np.arange(len(at))) else _there(at, where)


def _chosen(table: torch.Tensor, at: torch.Tensor | None, many: int) -> torch.Tensor:
    """The entries of so `many` rows; `at`: see Scores._at."""
    return table[:many] if at is None else table[at]


def _bytes(table: np.ndarray, most: np.ndarray) -> bytes:
    """Of scores int32 [N, words], each with the alternatives that its row asked for, `most` [N]."""
    if len(set(most.tolist())) <= 1:
        return narrowed(table, int(most.max(initial=0))).tobytes()
    return b"".join(
        narrowed(table[row : row + 1], wanted).tobytes() for row, wanted in enumerate(most.tolist())
    )


def _width(most: int) -> int:
    return OWN_WORDS + 2 * most


def _there(array: np.ndarray, where: torch.device) -> torch.Tensor:
    """What is copied from memory that is not pinned has been read when this returns, but the copy
    itself waits for its turn on the stream."""
    return tensor_of(array).to(where, non_blocking=True)

"""Token embedding and LM head, split over ranks by vocabulary.

Each rank holds an equal run of rows, the last ranks padded with zeros where the vocabulary does not
divide. Knows no tokenizer: an id is a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from pipeinfer.layers.matrix import Matrix
from pipeinfer.layers.placement import Placement, Source


class VocabularyRows:
    """This rank's rows of a [vocab, hidden] matrix: [ceil(vocab / ranks), hidden]."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        shard = placement.shard
        share = -(-vocab_size // shard.size)
        self._name = name
        self.vocab_size = vocab_size
        self.start = min(shard.rank * share, vocab_size)
        self.stop = min(self.start + share, vocab_size)
        self.matrix = Matrix(placement.empty(share, hidden_size))
        self.matrix.weight[self.stop - self.start :].zero_()

    def sources(self, prefix: str) -> Iterator[Source]:
        """`prefix` is the path of the parent module, with its dot."""
        weight = self.matrix.weight
        hidden = weight.shape[1]
        slices = (slice(self.start, self.stop), slice(0, hidden))
        target = weight[: self.stop - self.start]
        yield Source(f"{prefix}{self._name}.weight", (self.vocab_size, hidden), slices, target)


class Embedding:
    """Ids int64 [T] to vectors [T, hidden], a new tensor; the sum over ranks."""

    def __init__(self, rows: VocabularyRows, placement: Placement) -> None:
        self.rows = rows
        self._table = rows.matrix.weight
        self._placement = placement

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.rows
        if self._placement.alone:
            return functional.embedding(tokens, self._table)
        local = tokens - rows.start
        foreign = (local < 0) | (local >= rows.stop - rows.start)
        vectors = functional.embedding(local.masked_fill(foreign, 0), self._table)
        return self._placement.reduce(vectors.masked_fill_(foreign[:, None], 0))


class ScaledEmbedding:
    """As Embedding, times `scale`, which is rounded to the model's dtype first."""

    def __init__(self, rows: VocabularyRows, placement: Placement, scale: float) -> None:
        self.rows = rows
        self._plain = Embedding(rows, placement)
        self._scale = float(torch.tensor(scale, dtype=placement.dtype))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._plain(tokens).mul_(self._scale)


class Head:
    """Hidden states [S, hidden] to logits [S, vocab]; `rows` are the embedding's where tied.

    `local` gives this rank's share only, [S, share], for ids `rows.start` and following.
    """

    def __init__(self, rows: VocabularyRows, placement: Placement) -> None:
        self.rows = rows
        self._placement = placement

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._placement.gather(self.local(hidden))
        return logits[:, : self.rows.vocab_size]

    def local(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rows.matrix(hidden)

"""Token embedding and LM head, split over ranks by vocabulary.

Each rank holds an equal run of rows, the last ranks padded with zeros where the vocabulary does not
divide. Knows no tokenizer: an id is a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional

from pipeinfer.checkpoint.quantization import Int8
from pipeinfer.layers.int8_products import int8_gemm
from pipeinfer.layers.int8_values import Int8Tensor
from pipeinfer.layers.kept import QuantizedWeight
from pipeinfer.layers.matrix import UnquantizedWeight, Weight
from pipeinfer.layers.placement import Placement, WeightSource

# Of rows int64 [T], counted from this rank's first: [T, hidden].
Lookup = Callable[[torch.Tensor], torch.Tensor]


class VocabShard:
    """This rank's rows of a [vocab, hidden] matrix: [ceil(vocab / ranks), hidden].

    matrix: for products.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        shard = placement.shard
        share = -(-vocab_size // shard.size)
        self._name = name
        self.vocab_size = vocab_size
        self.start = min(shard.rank * share, vocab_size)
        self.stop = min(self.start + share, vocab_size)
        self._hidden = hidden_size
        size, used, form = (share, hidden_size), self.stop - self.start, Int8()
        how = placement.quantization
        stays = how is not None and how.format == form
        products = int8_gemm(form, size, placement) if stays else None
        self._values = None if products is None else Int8Tensor.empty(size, form, placement)
        if products is None or self._values is None:
            self._plain = UnquantizedWeight(placement.empty(*size))
            self._plain.weight[used:].zero_()
            self.weight: Weight = self._plain
            return
        self.weight = QuantizedWeight(self._values, None, products, split_k=False)
        for part in (self._values.weight, self._values.scale):
            part[used:].zero_()

    def lookup(self) -> Lookup:
        """Looks rows up, for whoever asks before the matrix is packed; a plain one stays then."""
        if self._values is not None:
            return self._values.lookup
        return partial(functional.embedding, weight=self._plain.weight)

    def sources(self, prefix: str) -> Iterator[WeightSource]:
        """`prefix` is the path of the parent module, with its dot."""
        held, shape = slice(0, self.stop - self.start), (self.vocab_size, self._hidden)
        slices = (slice(self.start, self.stop), slice(0, self._hidden))
        yield from self.weight.sources(f"{prefix}{self._name}", held, shape, slices)


class Embedding:
    """Ids int64 [T] to vectors [T, hidden], a new tensor; the sum over ranks."""

    def __init__(self, rows: VocabShard, placement: Placement) -> None:
        self.rows = rows
        self._lookup = rows.lookup()
        self._placement = placement

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.rows
        if self._placement.single_rank:
            return self._lookup(tokens)
        local = tokens - rows.start
        foreign = (local < 0) | (local >= rows.stop - rows.start)
        vectors = self._lookup(local.masked_fill(foreign, 0))
        return self._placement.reduce(vectors.masked_fill_(foreign[:, None], 0))


class ScaledEmbedding:
    """As Embedding, times `scale`, which is rounded to the model's dtype first."""

    def __init__(self, rows: VocabShard, placement: Placement, scale: float) -> None:
        self.rows = rows
        self._plain = Embedding(rows, placement)
        self._scale = float(torch.tensor(scale, dtype=placement.dtype))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._plain(tokens).mul_(self._scale)


class LMHead:
    """Hidden states [S, hidden] to logits [S, vocab]; `rows` are the embedding's where tied.

    `local` gives this rank's share only, [S, share], for ids `rows.start` and following.
    """

    def __init__(self, rows: VocabShard, placement: Placement) -> None:
        self.rows = rows
        self._placement = placement

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._placement.gather(self.local_logits(hidden))
        return logits[:, : self.rows.vocab_size]

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rows.weight(hidden)

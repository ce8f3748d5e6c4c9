"""From hidden states to ids, on one rank that has all logits or on several that have a part each.

Knows rows of parameters by name, and what ranks exchange; no request, no slot and no device. The
kernels are those of kernels/interface.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from pipeinfer.engine.logprobs import log_probs
from pipeinfer.kernels.host.truncation import is_truncated
from pipeinfer.kernels.interface import Kernels, Knobs
from pipeinfer.models.interface import Model
from pipeinfer.tensors import tensor_of

NONE = np.empty(0, dtype=np.int64)  # rows


class Sampler(Protocol):
    """From hidden states to ids; `logits` are this rank's part of them, which the others take.

    first_id: the id of their first column. vocab: how many ids there are, on all ranks together.
    """

    first_id: int
    vocab: int

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """[S, hidden] to [S, share]."""
        ...

    def whole(self, logits: torch.Tensor, /) -> torch.Tensor:
        """[S, vocab]; all ranks must call it."""
        ...

    def masks(self, words: torch.Tensor, /) -> torch.Tensor:
        """int32 [N, W], on the device: rank 0's `words`, whatever those of other ranks hold; all
        ranks must call it."""
        ...

    def sample(
        self, logits: torch.Tensor, knobs: Knobs, last_token: torch.Tensor, truncated: np.ndarray, /
    ) -> torch.Tensor:
        """int64 [S, 2], how many tokens each row gave and which, the same on all ranks; ids also go
        to last_token at `write_slots`. A row of bad logits gives none. truncated: int64, the rows
        with top-k, top-p or min-p.
        """
        ...

    def score(self, logits: torch.Tensor, ids: torch.Tensor, most: int, /) -> torch.Tensor:
        """int32 [N, 2 + 2 most]: scores of `ids` int64 [N], from logits [N, share] that nothing
        has changed; all ranks must call it."""
        ...


class WholeSampler:
    """For one rank, whose model gives all logits."""

    first_id = 0

    def __init__(self, model: Model, kernels: Kernels) -> None:
        self.logits = model.logits
        self.vocab = model.vocabulary.vocab_size
        self._kernels = kernels

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def masks(self, words: torch.Tensor) -> torch.Tensor:
        return words

    def sample(
        self, logits: torch.Tensor, knobs: Knobs, last_token: torch.Tensor, truncated: np.ndarray
    ) -> torch.Tensor:
        return self._kernels.sample(logits, knobs, last_token, len(truncated) > 0)

    def score(self, logits: torch.Tensor, ids: torch.Tensor, most: int) -> torch.Tensor:
        return self._kernels.scores(logits, ids, most)


class Ranks(Protocol):
    """What ranks exchange; see distributed/collectives.py."""

    def collect(self, partial: torch.Tensor) -> torch.Tensor:
        """[size, ...]: `partial` of every rank."""
        ...

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """[..., n] of every rank, side by side: [..., n * size]."""
        ...

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, which become those of rank 0 in place."""
        ...


class SplitSampler:
    """For a rank whose model gives the logits of a run of the vocabulary.

    A few numbers a row and rank are exchanged; of rows that are truncated all logits, too.
    """

    def __init__(self, model: Model, ranks: Ranks, kernels: Kernels) -> None:
        rows = model.vocabulary
        self.logits = model.local_logits
        self.first_id = rows.start
        self._held = rows.stop - rows.start
        self.vocab = rows.vocab_size
        self._ranks = ranks
        self._kernels = kernels

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_gather(logits)[:, : self.vocab]

    def masks(self, words: torch.Tensor) -> torch.Tensor:
        return self._ranks.broadcast(words)

    def sample(
        self, logits: torch.Tensor, knobs: Knobs, last_token: torch.Tensor, truncated: np.ndarray
    ) -> torch.Tensor:
        mine = self._kernels.offer(logits[:, : self._held], knobs, self.first_id)
        drawn = self._kernels.choose(self._ranks.collect(mine), knobs, last_token)
        if len(truncated):
            at = tensor_of(truncated).to(logits.device)
            some = {name: values[at] for name, values in knobs.items()}
            whole = self.whole(logits[at])
            drawn[at] = self._kernels.sample(whole, some, last_token, True)
        return drawn

    def score(self, logits: torch.Tensor, ids: torch.Tensor, most: int) -> torch.Tensor:
        mine = logits[:, : self._held]
        return log_probs(self._kernels, mine, ids, most, self.first_id, self._ranks.collect)


def truncated(fields: Mapping[str, np.ndarray]) -> np.ndarray:
    """int64: the rows that leave out some ids, if they are random."""
    return np.flatnonzero(is_truncated(fields["top_k"], fields["top_p"], fields["min_p"]))

"""Sampling on the device, from parameters that lie in a step's buffer: on one rank, or on several.

Knows views, slots and what ranks exchange; the kernels are in kernels/gumbel.py and offers.py.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from pipeinfer.engine.fields import FIELDS
from pipeinfer.kernels.gumbel import sample
from pipeinfer.kernels.offers import choose, offer

NONE = np.empty(0, dtype=np.int64)  # rows
PER_ROW = (*(field.name for field in FIELDS), "sample_positions", "write_slots")
Views = dict[str, torch.Tensor]


class Sampler(Protocol):
    """From hidden states to ids; `logits` are this rank's part of them, which the others take.

    first_id: the id of their first column.
    """

    first_id: int

    def logits(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """[S, hidden] to [S, share]."""
        ...

    def whole(self, logits: torch.Tensor, /) -> torch.Tensor:
        """[S, vocab]; all ranks must call it."""
        ...

    def sample(
        self, logits: torch.Tensor, views: Views, last_token: torch.Tensor, truncated: np.ndarray, /
    ) -> torch.Tensor:
        """int64 [S, 2], how many tokens each row gave and which, the same on all ranks; ids also go
        to last_token at `write_slots`. A row of bad logits gives none. truncated: int64, the rows
        with top-k, top-p or min-p.
        """
        ...


class WholeSampler:
    """For one rank, whose model gives all logits."""

    def __init__(self, model: Any) -> None:
        self.first_id = 0
        self.logits = model.logits
        self.sample = sample_rows

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Ranks(Protocol):
    """What ranks exchange; see distributed/group.py."""

    def collect(self, partial: torch.Tensor) -> torch.Tensor:
        """[size, ...]: `partial` of every rank."""
        ...

    def all_gather(self, partial: torch.Tensor) -> torch.Tensor:
        """[..., n] of every rank, side by side: [..., n * size]."""
        ...


class SplitSampler:
    """For a rank whose model, a CausalLM, gives the logits of a run of the vocabulary.

    Two numbers a row and rank are exchanged; of rows that are truncated all logits, too.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        rows = model.head.rows
        self.logits = model.local_logits
        self.first_id, self._held = rows.start, rows.stop - rows.start
        self._vocab = rows.vocab_size
        self._ranks = ranks

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        return self._ranks.all_gather(logits)[:, : self._vocab]

    def sample(
        self, logits: torch.Tensor, views: Views, last_token: torch.Tensor, truncated: np.ndarray
    ) -> torch.Tensor:
        heat = views["temperature"]
        mine = offer(
            logits[:, : self._held], heat, views["seed"], views["sample_positions"], self.first_id
        )
        drawn = choose(self._ranks.collect(mine), heat, last_token, views["write_slots"])
        if len(truncated):
            at = torch.from_numpy(truncated).to(logits.device)
            some = {name: views[name][at] for name in PER_ROW}
            drawn[at] = sample_rows(self.whole(logits[at]), some, last_token, truncated)
        return drawn


def sample_rows(
    logits: torch.Tensor, views: Views, last_token: torch.Tensor, truncated: np.ndarray
) -> torch.Tensor:
    """See Sampler.sample; logits [S, vocab]."""
    return sample(
        logits,
        views["temperature"],
        views["top_k"],
        views["top_p"],
        views["min_p"],
        views["seed"],
        views["sample_positions"],
        truncate=len(truncated) > 0,
        last_token=last_token,
        slots=views["write_slots"],
    )

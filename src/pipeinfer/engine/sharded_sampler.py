"""Sampling where each rank of a group has a run of the vocabulary: what has to be exchanged.

Greedy rows and rows with a temperature alone cost three numbers a rank; only rows that are
truncated are put together. Every rank ends with the same ids. Knows no model and no request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from pipeinfer.engine.sampler import drawn, is_random, is_truncated, over_kept
from pipeinfer.kernels import noise
from pipeinfer.steps.step import SamplingRows


class Collector(Protocol):
    """The one collective that sampling needs; see distributed/group.py."""

    def collect(self, partial: torch.Tensor) -> torch.Tensor:
        """[size, ...]: `partial` of every rank."""
        ...


class SplitHostSampler:
    """Of a rank whose model (a CausalLM) gives the logits of a run of the vocabulary."""

    def __init__(self, model: Any, group: Collector) -> None:
        rows = model.head.rows
        self.first_id: int = rows.start
        self.logits: Callable[[torch.Tensor], torch.Tensor] = model.local_logits
        self._vocab: int = rows.vocab_size
        self._group = group

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return sample_sharded(logits, rows, self.first_id, self._vocab, self._group)


def sample_sharded(
    logits: torch.Tensor, rows: SamplingRows, start: int, vocab: int, group: Collector
) -> torch.Tensor:
    """int64 [S, 2] on the host as from sampler.py's sample(), the same on all ranks and what one
    rank alone would sample from the whole.

    logits: float [S, share], those of ids start .. start + share - 1, where ids from `vocab` on do
    not exist.
    """
    values = logits.float().cpu().numpy()[:, : max(vocab - start, 0)]
    truncated = is_truncated(rows.fields, vocab) & is_random(rows)
    ids, good = _best(values, rows, start, group)
    whole = np.flatnonzero(truncated & good)  # the same on all ranks, as the ids are
    if len(whole):
        ids[whole] = _truncated(values[whole], rows.take(whole), logits.shape[1], vocab, group)
    return drawn(ids, good)


def _best(
    values: np.ndarray, rows: SamplingRows, start: int, group: Collector
) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [S] of the best candidates of all ranks, truncation left out of account, and bool
    [S], the rows whose logits are good."""
    count, width = values.shape
    # Of each row: | what candidates are compared by | its id | the greatest logit |, float64
    mine = np.full((count, 3), -np.inf)
    mine[:, 1] = 2**52  # a rank without an id of its own loses every tie
    if width:
        mine[:, 2] = values.max(axis=-1)
        scores = values
        random = is_random(rows)
        if random.any():
            hot = rows.take(np.flatnonzero(random))
            scores = values.astype(np.float64)
            scores[random] /= hot.fields["temperature"][:, None]
            scores[random] += noise.gumbel(hot.fields["seed"], hot.positions, width, start)
        local = scores.argmax(axis=-1)
        mine[:, 0] = np.take_along_axis(scores, local[:, None], axis=-1)[:, 0]
        mine[:, 1] = local + start
    everybody = group.collect(torch.from_numpy(mine)).numpy()
    good = np.isfinite(everybody[:, :, 2].max(axis=0, initial=-np.inf))
    scores, candidates = everybody[:, :, 0], everybody[:, :, 1]
    candidates = np.where(scores == scores.max(axis=0), candidates, np.inf)
    return np.where(good, candidates.min(axis=0), 0).astype(np.int64), good


def _truncated(
    values: np.ndarray, rows: SamplingRows, share: int, vocab: int, group: Collector
) -> np.ndarray:
    """Ids of rows with top-k, top-p or min-p, from their whole logits."""
    padded = np.full((len(values), share), -np.inf, dtype=np.float32)
    padded[:, : values.shape[1]] = values
    parts = group.collect(torch.from_numpy(padded)).numpy()
    whole = np.concatenate(list(parts), axis=-1)[:, :vocab]
    with np.errstate(over="ignore"):  # as in sampler.py
        whole -= whole.max(axis=-1, keepdims=True)
        whole /= rows.fields["temperature"][:, None]
    return over_kept(whole, rows, np.arange(len(values)))

"""From logits to tokens in NumPy: greedy, or Gumbel-max over what top-k, top-p and min-p leave; on
one rank, or from what ranks with a run of the vocabulary each offer.

See kernels/interface.py for what the functions do. A row's token depends on its own logits,
parameters, seed and position only: never on what else is in the batch, or on its place in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pipeinfer.kernels import noise
from pipeinfer.kernels.host.truncation import is_truncated, truncation_thresholds
from pipeinfer.kernels.interface import SamplingTensors
from pipeinfer.kernels.tables import GREEDY_BELOW

LOGITS_PER_BLOCK = (
    1 << 18
)  # logits handled at a time, so that the passes over them stay in the cache
SPARSE_NOISE_COST = 6  # noise for single ids costs that many times more than for a whole row
NO_CANDIDATE = 2**52  # a rank without an id of its own loses every tie


@dataclass(frozen=True)
class SamplingRows:
    """SamplingTensors of S rows, seeds as uint64."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray

    @classmethod
    def of(cls, sampling: SamplingTensors) -> SamplingRows:
        """The same arrays."""
        names = "temperature", "top_k", "top_p", "min_p", "seed", "sample_positions"
        temperature, top_k, top_p, min_p, seeds, positions = (
            sampling[name].numpy() for name in names
        )
        return cls(temperature, top_k, top_p, min_p, seeds.view(np.uint64), positions)


def sample(
    logits: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor, truncate: bool = True
) -> torch.Tensor:
    """See interface.py, here and below. Of equal best candidates the lowest id wins."""
    values, rows = logits.float().numpy(), SamplingRows.of(sampling)
    ids = values.argmax(axis=-1)
    peaks = np.take_along_axis(values, ids[:, None], axis=-1)
    finite = np.isfinite(peaks[:, 0])  # a row with a NaN has it at its argmax
    random = (rows.temperature >= GREEDY_BELOW) & finite
    if random.any():
        vocab = values.shape[1]
        truncated = np.zeros(len(ids), dtype=bool)
        if truncate:
            truncated = is_truncated(rows.top_k, rows.top_p, rows.min_p, vocab)
        for block in _blocks(random & ~truncated, vocab):
            ids[block] = _over_all(_scaled(values, peaks, rows, block), rows, block)
        for block in _blocks(random & truncated, vocab):
            ids[block] = _over_kept(_scaled(values, peaks, rows, block), rows, block)
    return _drawn(ids, finite, sampling, last_token)


def local_argmax(logits: torch.Tensor, sampling: SamplingTensors, first_id: int) -> torch.Tensor:
    """float64 [S, 3]: | what candidates are compared by | id of the best | the greatest logit |"""
    values, rows = logits.float().numpy(), SamplingRows.of(sampling)
    count, width = values.shape
    mine = np.full((count, 3), -np.inf)
    mine[:, 1] = NO_CANDIDATE
    if width:
        mine[:, 2] = values.max(axis=-1)
        scores, random = values, rows.temperature >= GREEDY_BELOW
        if random.any():
            scores = values.astype(np.float64)
            scores[random] /= rows.temperature[random, None]
            hot = rows.seeds[random], rows.positions[random]
            scores[random] += noise.gumbel_noise(*hot, width, first_id)
        local = scores.argmax(axis=-1)
        mine[:, 0] = np.take_along_axis(scores, local[:, None], axis=-1)[:, 0]
        mine[:, 1] = local + first_id
    return torch.from_numpy(mine)


def global_argmax(
    offers: torch.Tensor, sampling: SamplingTensors, last_token: torch.Tensor
) -> torch.Tensor:
    scores, candidates, greatest = np.moveaxis(offers.numpy(), -1, 0)
    good = np.isfinite(greatest.max(axis=0, initial=-np.inf))
    ids = np.where(scores == scores.max(axis=0), candidates, np.inf).min(axis=0)
    return _drawn(np.where(good, ids, 0).astype(np.int64), good, sampling, last_token)


def _drawn(
    ids: np.ndarray, good: np.ndarray, sampling: SamplingTensors, last_token: torch.Tensor
) -> torch.Tensor:
    """int64 [S, 2]: one token, of `ids` [S], for the rows in `good` bool [S], else none."""
    made = np.empty((len(ids), 2), dtype=np.int64)
    made[:, 0] = good
    # A bad row may be part of one more step: it goes on from an id that exists.
    made[:, 1] = ids * good
    last_token.numpy()[sampling["write_slots"].numpy()] = made[:, 1]
    return torch.from_numpy(made)


def _blocks(chosen: np.ndarray, vocab: int) -> list[np.ndarray]:
    """The indices of the chosen rows, a few at a time."""
    indices = np.flatnonzero(chosen)
    size = max(LOGITS_PER_BLOCK // vocab, 1)
    return [indices[begin : begin + size] for begin in range(0, len(indices), size)]


def _scaled(
    values: np.ndarray, peaks: np.ndarray, rows: SamplingRows, block: np.ndarray
) -> np.ndarray:
    """Logits of the block's rows over temperature, shifted so that each maximum is 0.

    The peak goes first: differences are exact where they matter, and nothing overflows upwards.
    """
    x = values[block]
    with np.errstate(over="ignore"):  # what lies that far below the peak is never sampled anyway
        x -= peaks[block]
        x /= rows.temperature[block, None]
    return x


def _over_all(x: np.ndarray, rows: SamplingRows, block: np.ndarray) -> np.ndarray:
    x += noise.gumbel_noise(rows.seeds[block], rows.positions[block], x.shape[1])
    return x.argmax(axis=-1)


def _over_kept(x: np.ndarray, rows: SamplingRows, block: np.ndarray) -> np.ndarray:
    """Gumbel-max over what truncation leaves; noise is made only for that, if it is little."""
    keep = x >= truncation_thresholds(x, rows.top_k[block], rows.top_p[block], rows.min_p[block])
    flat = np.flatnonzero(keep)
    if len(flat) * SPARSE_NOISE_COST > x.size:
        x[~keep] = -np.inf
        return _over_all(x, rows, block)
    row, ids = np.divmod(flat, x.shape[1])
    value = noise.gumbel_noise_at(rows.seeds[block][row], rows.positions[block][row], ids)
    value += x.reshape(-1)[flat]
    # Candidates lie row after row, lowest id first, and every row has one.
    best = np.maximum.reduceat(value, np.searchsorted(row, np.arange(len(x))))
    winners = np.flatnonzero(value == best[row])
    return ids[winners[np.searchsorted(row[winners], np.arange(len(x)))]]

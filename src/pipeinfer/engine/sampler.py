"""From logits to tokens: greedy, or Gumbel-max over what temperature, top-k, top-p, min-p leave.

Knows rows of parameters, no request. A row's token depends on its own logits, parameters, seed and
position only: never on what else is in the batch, or on the row's place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np
import torch

from pipeinfer.engine.truncation import thresholds
from pipeinfer.kernels import noise
from pipeinfer.steps.step import SamplingRows

# All arithmetic is NumPy's, on the host: its vectorised loops need no thread pool, while every
# torch operation of this size waits for all threads, a time slice each when the cores are shared.

GREEDY_BELOW = 1e-5  # such a temperature is greedy, as in vLLM
BLOCK_VALUES = 1 << 18  # logits handled at a time, so that the passes over them stay in the cache
SPARSE = 6  # noise for single ids costs that many times more than for a whole row


class HostSampler:
    """Of one rank, whose model (a CausalLM) gives all logits; see Sampler in engine/runner.py."""

    first_id = 0

    def __init__(self, model: Any) -> None:
        self.logits: Callable[[torch.Tensor], torch.Tensor] = model.logits

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        return sample(logits, rows)


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """int64 [S, 2] on the host, of each row how many tokens it gave and which, for float logits
    [S, vocab] on any device.

    Of equal best candidates the lowest id wins. A bad row, which has a NaN, an infinity, or nothing
    left to sample, gives none and leaves the others alone.
    """
    values = logits.float().cpu().numpy()
    ids = values.argmax(axis=-1)
    peaks = np.take_along_axis(values, ids[:, None], axis=-1)
    finite = np.isfinite(peaks[:, 0])  # a row with a NaN has it at its argmax
    random = is_random(rows) & finite
    if random.any():
        truncated = is_truncated(rows.fields, values.shape[1])
        for block in _blocks(random & ~truncated, values.shape[1]):
            ids[block] = _over_all(_scaled(values, peaks, rows, block), rows, block)
        for block in _blocks(random & truncated, values.shape[1]):
            ids[block] = over_kept(_scaled(values, peaks, rows, block), rows, block)
    return drawn(ids, finite)


def is_random(rows: SamplingRows) -> np.ndarray:
    """bool [S]: which rows are not greedy."""
    return rows.fields["temperature"] >= GREEDY_BELOW


def is_truncated(fields: Mapping[str, np.ndarray], vocab: float = inf) -> np.ndarray:
    """bool [S]: of which rows top-k, top-p or min-p leave out some of `vocab` ids, if they are
    random; where it does not say how many there are, any top-k may."""
    top_k, top_p, min_p = (fields[name] for name in ("top_k", "top_p", "min_p"))
    return (top_k > 0) & (top_k < vocab) | (top_p < 1) | (min_p > 0)


def drawn(ids: np.ndarray, good: np.ndarray) -> torch.Tensor:
    """int64 [S, 2]: one token, of `ids` [S], for the rows in `good` bool [S], else none."""
    return torch.from_numpy(np.stack((good, ids * good), axis=1).astype(np.int64))


def _blocks(chosen: np.ndarray, vocab: int) -> list[np.ndarray]:
    """The indices of the chosen rows, a few at a time."""
    indices = np.flatnonzero(chosen)
    size = max(BLOCK_VALUES // vocab, 1)
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
        x /= rows.fields["temperature"][block, None]
    return x


def _over_all(x: np.ndarray, rows: SamplingRows, block: np.ndarray) -> np.ndarray:
    x += noise.gumbel(rows.fields["seed"][block], rows.positions[block], x.shape[1])
    return x.argmax(axis=-1)


def over_kept(x: np.ndarray, rows: SamplingRows, block: np.ndarray) -> np.ndarray:
    """Gumbel-max over what truncation leaves; noise is made only for that, if it is little."""
    rows = rows.take(block)
    fields = rows.fields
    keep = x >= thresholds(x, fields["top_k"], fields["top_p"], fields["min_p"])
    flat = np.flatnonzero(keep)
    if len(flat) * SPARSE > x.size:
        x[~keep] = -np.inf
        return _over_all(x, rows, np.arange(len(x)))
    row, ids = np.divmod(flat, x.shape[1])
    value = noise.gumbel_at(fields["seed"][row], rows.positions[row], ids)
    value += x.reshape(-1)[flat]
    # Candidates lie row after row, lowest id first, and every row has one.
    best = np.maximum.reduceat(value, np.searchsorted(row, np.arange(len(x))))
    winners = np.flatnonzero(value == best[row])
    return ids[winners[np.searchsorted(row[winners], np.arange(len(x)))]]

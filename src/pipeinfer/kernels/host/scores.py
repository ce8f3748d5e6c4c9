"""Log-probs of tokens out of logits, with their ranks and the likeliest others, on the host.

Row by row: what is made of one stays in a core's cache. See kernels/interface.py for what the
functions do. Knows rows and ids; no request, no rank and no sampling.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.kernels.tables import NO_LOGIT_KEY
from pipeinfer.logprobs import NO_ID

HIGHEST_ID = 2**31 - 1
MAX_BLOCK = 128  # ids of which the greatest logit is looked at first


def logprobs(logits: torch.Tensor, ids: torch.Tensor, most: int) -> torch.Tensor:
    """See interface.py, here and below."""
    own = logit_keys(logits, ids, 0)
    return merge_topk(local_topk(logits, own, most, 0)[None], own)


def logit_keys(logits: torch.Tensor, ids: torch.Tensor, first_id: int) -> torch.Tensor:
    columns = ids - first_id
    if not logits.shape[1]:
        return torch.full_like(columns, NO_LOGIT_KEY)
    held = (columns >= 0) & (columns < logits.shape[1])
    mine = logits.gather(1, torch.where(held, columns, 0)[:, None])[:, 0]
    return torch.where(held, _keys(mine.float(), ids), NO_LOGIT_KEY)


def local_topk(logits: torch.Tensor, own: torch.Tensor, most: int, first_id: int) -> torch.Tensor:
    records = np.full((len(logits), 2 + most), NO_LOGIT_KEY)
    room = np.empty(logits.shape[1], dtype=np.float32)
    for record, one, key in zip(records, logits, own.tolist(), strict=True):
        row = one.float().numpy()
        record[0] = _log_sum(row, room).view(np.int32)
        record[1] = _above(row, key, first_id)
        best = _best(row, most, first_id)
        record[2 : 2 + len(best)] = best
    return torch.from_numpy(records)


def merge_topk(records: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    total = records[:, :, 0].int().view(torch.float32).logsumexp(0)
    above = records[:, :, 1].sum(0)
    every = records[:, :, 2:]
    best = every.movedim(0, 1).flatten(1).topk(every.shape[2], dim=1).values
    ids, values = _read(torch.cat((own[:, None], best), dim=1))
    values = (values - total[:, None]).view(torch.int32)
    return torch.cat((values[:, :1], above[:, None].int() + 1, ids[:, 1:], values[:, 1:]), dim=1)


def _log_sum(row: np.ndarray, room: np.ndarray) -> np.float32:
    """log(sum(exp(row))) of float32 [n]; `room` is as large."""
    peak = row.max(initial=np.float32(-np.inf))
    if not np.isfinite(peak):
        return np.float32(peak)
    np.exp(np.subtract(row, peak, out=room), out=room)
    return peak + np.log(room.sum())


def _above(row: np.ndarray, key: int, first_id: int) -> int:
    """How many ids of the row, from `first_id` on, have greater keys."""
    ids, values = _read(torch.tensor([key]))
    column = min(max(int(ids) - first_id, 0), len(row))
    value = np.float32(values.item())
    return int(np.count_nonzero(row > value) + np.count_nonzero(row[:column] == value))


def _best(row: np.ndarray, most: int, first_id: int) -> np.ndarray:
    """int64 [most], or as many as there are: the greatest keys, falling.

    As many blocks as are asked for have a maximum that is not less than the least of the greatest
    maxima: only ids with logits from there on can be among the best. That takes one pass.
    """
    blocks = len(row) // MAX_BLOCK
    if not most:
        return np.empty(0, dtype=np.int64)
    if blocks <= most:
        columns = np.arange(len(row))
    else:
        maxima = row[: blocks * MAX_BLOCK].reshape(blocks, MAX_BLOCK).max(axis=1)
        columns = np.flatnonzero(row >= np.partition(maxima, blocks - most)[blocks - most])
    keys = _keys(torch.from_numpy(row[columns]), torch.from_numpy(columns + first_id)).numpy()
    if len(keys) > most:
        keys = np.partition(keys, len(keys) - most)[len(keys) - most :]
    return np.sort(keys)[::-1]


def _keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64, as many, of float32 logits; no two are equal. To be made of few ids: a whole
    vocabulary's take longer than all else here.

    A float's bits, read as an integer, order positive floats; the bits below the sign of a negative
    one are turned round.
    """
    bits = (logits + 0.0).view(torch.int32)  # there is one zero
    ordered = torch.where(bits < 0, bits ^ HIGHEST_ID, bits).long()
    return (ordered << 32) | (HIGHEST_ID - ids)


def _read(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32, logits float32) of keys; for one that is not there NO_ID and a low number."""
    ids = HIGHEST_ID - (keys & 0xFFFFFFFF)
    ordered = (keys >> 32).int()
    logits = torch.where(ordered < 0, ordered ^ HIGHEST_ID, ordered).view(torch.float32)
    there = keys != NO_LOGIT_KEY
    return torch.where(there, ids, NO_ID).int(), torch.where(there, logits, float("-inf"))

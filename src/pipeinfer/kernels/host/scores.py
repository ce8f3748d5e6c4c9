"""Log-probs of tokens out of logits, with their ranks and the likeliest others, on the host.

Torch operations, which pass over a vocabulary faster than NumPy's. See kernels/interface.py for
what the functions do. Knows rows and ids; no request, no rank and no sampling.
"""

from __future__ import annotations

import torch

from pipeinfer.kernels.tables import NO_KEY
from pipeinfer.logprobs import NO_ID

HIGHEST_ID = 2**31 - 1


def scores(logits: torch.Tensor, ids: torch.Tensor, most: int) -> torch.Tensor:
    """See interface.py, here and below."""
    own = own_keys(logits, ids, 0)
    return tell(survey(logits, own, most, 0)[None], own)


def own_keys(logits: torch.Tensor, ids: torch.Tensor, first_id: int) -> torch.Tensor:
    columns = ids - first_id
    if not logits.shape[1]:
        return torch.full_like(columns, NO_KEY)
    held = (columns >= 0) & (columns < logits.shape[1])
    mine = logits.gather(1, torch.where(held, columns, 0)[:, None])[:, 0]
    return torch.where(held, _keys(mine.float(), ids), NO_KEY)


def survey(logits: torch.Tensor, own: torch.Tensor, most: int, first_id: int) -> torch.Tensor:
    logits = logits.float()
    best = _best(logits, most, first_id)
    missing = best.new_full((len(best), most - best.shape[1]), NO_KEY)
    total = logits.logsumexp(1).view(torch.int32).long()
    above = _above(logits, own, first_id)
    return torch.cat((total[:, None], above[:, None], best, missing), dim=1)


def tell(records: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    total = records[:, :, 0].int().view(torch.float32).logsumexp(0)
    above = records[:, :, 1].sum(0)
    every = records[:, :, 2:]
    best = every.movedim(0, 1).flatten(1).topk(every.shape[2], dim=1).values
    ids, values = _read(torch.cat((own[:, None], best), dim=1))
    values = (values - total[:, None]).view(torch.int32)
    return torch.cat((values[:, :1], above[:, None].int() + 1, ids[:, 1:], values[:, 1:]), dim=1)


def _keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64, as many, of float32 logits; no two are equal. To be made of few ids: a whole
    vocabulary's take longer than all else here.

    A float's bits, read as an integer, order positive floats; the bits below the sign of a negative
    one are turned round.
    """
    bits = (logits + 0.0).view(torch.int32)  # there is one zero
    ordered = torch.where(bits < 0, bits ^ HIGHEST_ID, bits).long()
    return (ordered << 32) | (HIGHEST_ID - ids)


def _best(logits: torch.Tensor, most: int, first_id: int) -> torch.Tensor:
    """int64 [N, most], or as many as there are: the greatest keys, falling."""
    share = logits.shape[1]
    most = min(most, share)
    if not most:
        return logits.new_empty((len(logits), 0), dtype=torch.int64)
    values, columns = logits.topk(most, dim=1)
    least = values[:, -1:]
    # Of those that equal the least of them it took any; these are the lowest, in their order.
    falling = torch.arange(share, 0, -1, dtype=torch.int32, device=logits.device)
    lowest = torch.where(logits == least, falling, 0).topk(most, dim=1).values
    above = values > least
    at = torch.arange(most, device=logits.device) - above.sum(1, keepdim=True)
    lowest = share - lowest.gather(1, at.clamp(min=0)).clamp(min=1)  # none equals a NaN
    columns = torch.where(above, columns, lowest)
    return _keys(values, first_id + columns).sort(dim=1, descending=True).values


def _above(logits: torch.Tensor, own: torch.Tensor, first_id: int) -> torch.Tensor:
    """int64 [N]: how many of this rank's ids have greater keys than `own` [N]."""
    ids, values = _read(own[:, None])
    here = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    lower = (logits == values).logical_and_(here < ids)
    return lower.logical_or_(logits > values).sum(1)


def _read(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32, logits float32) of keys; for one that is not there NO_ID and a low number."""
    ids = HIGHEST_ID - (keys & 0xFFFFFFFF)
    ordered = (keys >> 32).int()
    logits = torch.where(ordered < 0, ordered ^ HIGHEST_ID, ordered).view(torch.float32)
    there = keys != NO_KEY
    return torch.where(there, ids, NO_ID).int(), torch.where(there, logits, float("-inf"))

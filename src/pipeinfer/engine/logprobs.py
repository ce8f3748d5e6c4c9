"""Log-probs of tokens out of logits, with their ranks and the likeliest others.

Torch operations that are the same on every device, for one rank or for several with a run of the
vocabulary each. Knows rows and ids; no request, no slot and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pipeinfer.logprobs import NO_ID

AT_ONCE = 64  # rows: what is made of their logits has three times the logits' size
HIGHEST_ID = 2**31 - 1
NO_KEY = -(2**63)  # of an id that is not there

# [ranks, ...]: what every rank has made.
Collect = Callable[[torch.Tensor], torch.Tensor]


def alone(mine: torch.Tensor) -> torch.Tensor:
    """For a rank that has all logits."""
    return mine[None]


def log_probs(
    logits: torch.Tensor, ids: torch.Tensor, most: int, first_id: int, collect: Collect
) -> torch.Tensor:
    """The scores (pipeinfer/logprobs.py) of `ids` int64 [N], each with `most` alternatives, from
    logits [N, share] of the ids from `first_id` on: int32 [N, 2 + 2 most], the same on all ranks.

    Sums are float32. Of equal logits the lowest id is the likeliest.
    """
    logits = logits.float()
    own = _own(logits, ids, first_id)
    best = _best(logits, most, first_id)
    missing = best.new_full((len(best), most - best.shape[1]), NO_KEY)
    total = logits.logsumexp(1).view(torch.int32).long()
    every = collect(torch.cat((total[:, None], own[:, None], best, missing), dim=1))
    total = every[:, :, 0].int().view(torch.float32).logsumexp(0)
    own = every[:, :, 1].amax(0)
    best = every[:, :, 2:].movedim(0, 1).flatten(1).topk(most, dim=1).values
    above = collect(_above(logits, own, first_id)).sum(0)
    found, theirs = _read(torch.cat((own[:, None], best), dim=1))
    theirs = (theirs - total[:, None]).view(torch.int32)
    return torch.cat((theirs[:, :1], above[:, None].int() + 1, found[:, 1:], theirs[:, 1:]), dim=1)


def _keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64, as many: they order `ids` as their float32 logits do, and equal ones by id. No two are
    equal. To be made of few ids: a whole vocabulary's take longer than all else here.

    A float's bits, read as an integer, order positive floats; the bits below the sign of a negative
    one are turned round.
    """
    bits = (logits + 0.0).view(torch.int32)  # there is one zero
    ordered = torch.where(bits < 0, bits ^ HIGHEST_ID, bits).long()
    return (ordered << 32) | (HIGHEST_ID - ids)


def _own(logits: torch.Tensor, ids: torch.Tensor, first_id: int) -> torch.Tensor:
    """int64 [N]: the key of each row's id, where this rank has it."""
    columns = ids - first_id
    if not logits.shape[1]:
        return torch.full_like(columns, NO_KEY)
    held = (columns >= 0) & (columns < logits.shape[1])
    mine = logits.gather(1, torch.where(held, columns, 0)[:, None])[:, 0]
    return torch.where(held, _keys(mine, ids), NO_KEY)


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

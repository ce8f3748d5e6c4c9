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
    keys = _keys(logits, first_id)
    own = _of(keys, ids - first_id)
    best = keys.topk(min(most, keys.shape[1]), dim=1).values
    missing = best.new_full((len(best), most - best.shape[1]), NO_KEY)
    total = logits.logsumexp(1).view(torch.int32).long()
    every = collect(torch.cat((total[:, None], own[:, None], best, missing), dim=1))
    total = every[:, :, 0].int().view(torch.float32).logsumexp(0)
    own = every[:, :, 1].amax(0)
    best = every[:, :, 2:].movedim(0, 1).flatten(1).topk(most, dim=1).values
    above = collect((keys > own[:, None]).sum(1)).sum(0)
    found, theirs = _read(torch.cat((own[:, None], best), dim=1))
    theirs = (theirs - total[:, None]).view(torch.int32)
    return torch.cat((theirs[:, :1], above[:, None].int() + 1, found[:, 1:], theirs[:, 1:]), dim=1)


def _keys(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """int64 [N, share]: they order ids as logits do, and equal ones by id. No two are equal.

    A float's bits, read as an integer, order positive floats; the bits below the sign of a negative
    one are turned round.
    """
    bits = (logits + 0.0).view(torch.int32)  # there is one zero
    ordered = torch.where(bits < 0, bits ^ HIGHEST_ID, bits).long()
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    return (ordered << 32) | (HIGHEST_ID - ids)


def _of(keys: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the key in each row's column, where this rank has that column."""
    if not keys.shape[1]:
        return torch.full_like(columns, NO_KEY)
    held = (columns >= 0) & (columns < keys.shape[1])
    return torch.where(held, keys.gather(1, torch.where(held, columns, 0)[:, None])[:, 0], NO_KEY)


def _read(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int32, logits float32) of keys; for one that is not there NO_ID and a low number."""
    ids = HIGHEST_ID - (keys & 0xFFFFFFFF)
    ordered = (keys >> 32).int()
    logits = torch.where(ordered < 0, ordered ^ HIGHEST_ID, ordered).view(torch.float32)
    there = keys != NO_KEY
    return torch.where(there, ids, NO_ID).int(), torch.where(there, logits, float("-inf"))

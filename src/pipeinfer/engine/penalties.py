"""What a request has said already becomes less likely: repetition, frequency and presence.

Counts lie beside the logits, on their device, because the id of the step before may be known there
only. Knows slots and rows, no request. As in vLLM: repetition counts prompt and output, the others
count the output alone (https://arxiv.org/abs/1909.05858, section 4.1, and OpenAI's API).
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.steps.step import PenaltyRows, Said
from pipeinfer.tensors import tensor_of

AT_ONCE = 32  # rows, so that what is in between stays small
IN_PROMPT, IN_OUTPUT = 1, 2  # of a count: the lowest bit, and all others


class Penalties:
    """Of one rank, which has the logits of `ids`: int32 counts [slots, ids], allocated at once,
    because all memory that is free later is given to KV pages."""

    def __init__(self, slots: int, ids: range, device: torch.device | str) -> None:
        self._first_id = ids.start
        self._counts = torch.zeros((slots, len(ids)), dtype=torch.int32, device=device)

    @property
    def bytes(self) -> int:
        """What the counts take."""
        return self._counts.nbytes

    def apply(
        self, logits: torch.Tensor, rows: PenaltyRows, entries: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Changes logits float32 [R, ids and padding] in place, by what was said so far. Returns
        int64 [N] each: which of them are those of `rows`, and their slots.

        entries: int64 [S], which row of logits belongs to each row that samples; None: the same.
        """
        for said in rows.new:
            self._begin(said, self._counts[said.slot])
        at = self._tensor(rows.rows if entries is None else entries[rows.rows])
        slots, factors = self._tensor(rows.slots), self._tensor(rows.factors)
        logits = logits[:, : self._counts.shape[1]]
        for begin in range(0, len(at), AT_ONCE):
            part = slice(begin, begin + AT_ONCE)
            before, seen = logits[at[part]], self._counts[slots[part]]
            logits[at[part]] = penalized(before, seen, factors[part])
        return at, slots

    def count(self, drawn: torch.Tensor, at: torch.Tensor, slots: torch.Tensor) -> None:
        """Those rows of `drawn` int64 [R, 2], how many tokens each gave and which, are said now;
        at, slots: as `apply` has returned them."""
        many, ids = drawn.to(self._counts.device)[at].unbind(1)
        column = ids - self._first_id
        held = (many > 0) & (column >= 0) & (column < self._counts.shape[1])
        column = torch.where(held, column, 0)
        self._counts[slots, column] += IN_OUTPUT * held.int()  # no slot stands twice

    def _begin(self, said: Said, counts: torch.Tensor) -> None:
        """Sets `counts` int32 [ids] to those of one request."""
        counts.zero_()
        counts[self._columns(said.prompt, len(counts))] = IN_PROMPT
        output = self._columns(said.output, len(counts))
        counts.index_add_(0, output, torch.full_like(output, IN_OUTPUT, dtype=torch.int32))

    def _columns(self, ids: np.ndarray, width: int) -> torch.Tensor:
        """int64: where those of `ids` int32 stand that this rank has."""
        column = ids.astype(np.int64) - self._first_id
        return self._tensor(column[(column >= 0) & (column < width)])

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return tensor_of(array).to(self._counts.device)


def penalized(logits: torch.Tensor, counts: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """float32 [n, ids] of float32 [n, ids], counts int32 [n, ids] and factors float32 [n, 3].

    What is finite stays finite, whatever the factors: only the model makes logits bad.
    """
    finite = logits.isfinite()
    repetition, frequency, presence = factors.chunk(3, dim=1)
    again = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, again, logits)
    outputs = counts // IN_OUTPUT
    changed = logits - frequency * outputs - presence * (outputs > 0)
    return torch.where(finite, changed.nan_to_num(), changed)

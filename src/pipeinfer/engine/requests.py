"""How the request in each slot wants to be sampled, as arrays over slots.

Knows no page and no torch.
"""

from __future__ import annotations

import numpy as np

from pipeinfer.engine.fields import FIELDS, filled
from pipeinfer.messages import Admit, unpack
from pipeinfer.steps.step import PenaltyRows, Said, SamplingRows

_NOBODY = np.empty((0, 2), dtype=np.int64)
_NO_IDS = np.empty(0, dtype=np.int64)
LAST_POSITION = 2**62
NO_PENALTIES = 1.0, 0.0, 0.0  # repetition, frequency, presence


class RequestTable:
    """Sampling parameters by slot, [max_slots] each; stale in empty slots, where nobody reads."""

    def __init__(self, max_slots: int) -> None:
        self._fields = filled(max_slots)
        # Positions below this one must not get an id of `_suppress`; 0 where nothing is suppressed.
        self._free_from = np.zeros(max_slots, dtype=np.int64)
        self._suppress = [_NO_IDS] * max_slots
        self._pairs = b"", _NOBODY  # as made last, and for which rows and slots
        self._factors = np.zeros((max_slots, len(NO_PENALTIES)), dtype=np.float32)
        self._penalized = np.zeros(max_slots, dtype=bool)
        self._said: dict[int, Said] = {}  # of slots that have not sampled yet

    def put(self, admit: Admit) -> None:
        """Takes the parameters of a request that enters `admit.slot`."""
        slot, params = admit.slot, admit.params
        for field in FIELDS:
            self._fields[field.name][slot] = field.of(admit)
        self._suppress[slot] = np.array(admit.suppress, dtype=np.int64)
        self._pairs = b"", _NOBODY
        # Outputs are counted from the prompt's end, not from the admission: a request that was
        # preempted comes back with outputs among its known tokens.
        free_from = min(admit.prompt_len + params.min_tokens, LAST_POSITION)
        self._free_from[slot] = free_from if admit.suppress else 0
        factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalized[slot] = factors != NO_PENALTIES
        if self._penalized[slot]:
            ids = unpack(admit.token_ids)
            self._factors[slot] = factors
            self._said[slot] = Said(slot, ids[: admit.prompt_len], ids[admit.prompt_len :])

    def sampling_rows(self, slots: np.ndarray, positions: np.ndarray) -> SamplingRows:
        """The parameters of `slots` int32 [S]; `positions` int64 [S] are about to be sampled."""
        return SamplingRows(
            {name: values[slots] for name, values in self._fields.items()},
            positions,
            self.suppressed(slots, positions),
            self._penalties(slots),
        )

    def _penalties(self, slots: np.ndarray) -> PenaltyRows | None:
        rows = np.flatnonzero(self._penalized[slots])
        if len(rows) == 0:
            return None
        chosen = slots[rows].astype(np.int64)
        new = tuple(self._said.pop(slot) for slot in chosen.tolist() if slot in self._said)
        return PenaltyRows(rows, chosen, self._factors[chosen], new)

    def suppressed(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """(row, id) pairs int64 [n, 2] that must not be sampled; arguments as sampling_rows's.

        The same array, which nobody writes to, as long as the same rows want the same.
        """
        rows = np.flatnonzero(positions < self._free_from[slots])
        if len(rows) == 0:
            return _NOBODY
        chosen = slots[rows]
        wanted = rows.tobytes() + chosen.tobytes()
        if self._pairs[0] != wanted:
            ids = [self._suppress[slot] for slot in chosen.tolist()]
            row = np.repeat(rows, [len(some) for some in ids])
            self._pairs = wanted, np.stack((row, np.concatenate(ids)), axis=1)
        return self._pairs[1]

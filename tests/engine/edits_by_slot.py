"""Edits of logits as the host keeps them. Import it as `from edits_by_slot import Edited`."""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.engine.step_buffers import SlotState
from pipeinfer.engine.step_builder import MAX_LOGIT_EDITS
from pipeinfer.kernels import host
from pipeinfer.step import StepDelta


class Edited:
    """What deltas leave behind in so many slots; `state` is the engine's own."""

    def __init__(self, slots: int, pages: int = 8) -> None:
        self.state = SlotState(slots, pages, MAX_LOGIT_EDITS, torch.device("cpu"))

    def apply(self, delta: StepDelta) -> None:
        pairs = torch.from_numpy(self.state.apply_on_host(delta))
        host.scatter_words(pairs, torch.tensor([len(pairs) // 2]), self.state.words)

    def logits(
        self, logits: np.ndarray, slots, positions, first_id: int = 0, add_bias: bool = False
    ) -> np.ndarray:
        """A copy of [L, ids], edited."""
        logits = torch.from_numpy(logits.copy())
        where = [torch.tensor(list(part), dtype=torch.int64) for part in (slots, positions)]
        host.apply_logit_edits(logits, *where, self.state.logit_edits, first_id, add_bias)
        return logits.numpy()

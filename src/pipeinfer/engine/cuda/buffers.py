"""The step-private buffers: what a step in flight reads is not written for a later one.

Two parities, each with pinned words and room for what is sampled. Knows bytes; rooms.py says what
lies where.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.attention.interface import Plan

PARITIES = 2
MOST_PIECES = 1024
BLOCK = 256  # words that uploads are a multiple of, so that few sizes of them occur


class StepBuffers:
    """One parity. plan: what attention made of its step, whose memory is nobody else's until the
    step has ended.
    """

    def __init__(self, words: int, most_rows: int) -> None:
        self._pinned = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self.host: np.ndarray = self._pinned.numpy()
        self.drawn = torch.zeros(most_rows, 2, dtype=torch.int64, pin_memory=True)
        self.plan: Plan = None
        self._pieces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def upload(self, words: int, target: torch.Tensor) -> None:
        """Copies the first `words`, or a few more, to the beginning of `target`, which is the same
        always, on the current stream."""
        words = min(-(-words // BLOCK) * BLOCK, len(self.host))
        if words not in self._pieces:  # cutting tensors costs as much as the copy
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            self._pieces[words] = target[:words], self._pinned[:words]
        there, here = self._pieces[words]
        there.copy_(here, non_blocking=True)

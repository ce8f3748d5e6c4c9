"""The step-private buffers: what a step in flight reads is not written for a later one.

Two parities, each with one pinned buffer, its mirror on the device and room for what is sampled.
Knows bytes and events; layout.py says what lies where.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeinfer.attention.interface import Plan

PARITIES = 2
MOST_PIECES = 1024


class StepBuffers:
    """One parity. plan: what attention made of its step, whose memory is nobody else's until the
    step has ended.
    """

    def __init__(self, words: int, most_rows: int, device: torch.device) -> None:
        self.pinned = torch.zeros(words, dtype=torch.int32, pin_memory=True)
        self.host: np.ndarray = self.pinned.numpy()
        self.mirror = torch.zeros(words, dtype=torch.int32, device=device)
        self.drawn = torch.zeros(most_rows, 2, dtype=torch.int64, pin_memory=True)
        self.plan: Plan = None
        self.uploaded = torch.cuda.Event()
        self._pieces: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def check(self, words: int) -> None:
        """Raises ValueError if a step is larger than the engine was built for."""
        if words > len(self.host):
            raise ValueError(f"a step of {words} words does not fit into {len(self.host)}")

    def upload(self, words: int, stream: torch.cuda.Stream) -> None:
        """Copies the first `words` to the mirror, on `stream`, which is current; `uploaded` is when
        that, and all before it, is done.
        """
        self.copy_to(self.mirror, words)
        self.uploaded.record(stream)

    def copy_to(self, target: torch.Tensor, words: int) -> None:
        """Copies the first `words` to the beginning of `target` on the device, on the current
        stream."""
        key = target.data_ptr(), words
        if key not in self._pieces:  # cutting tensors costs as much as the copy
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            self._pieces[key] = target[:words], self.pinned[:words]
        there, here = self._pieces[key]
        there.copy_(here, non_blocking=True)

"""The step-private buffers: what a step in flight reads is not written for a later one.

Two parities, each with pinned words and room for what is sampled. Knows bytes; rooms.py says what
lies where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeinfer.attention.interface import Plan
from pipeinfer.engine.device import Device
from pipeinfer.engine.rooms import Packer

if TYPE_CHECKING:
    from pipeinfer.engine.executor import LaunchedStep

PARITIES = 2
MOST_PIECES = 1024
BLOCK = 256  # words that uploads are a multiple of, so that few sizes of them occur


class PinnedWords:
    """As many as the largest step had; none before the first one that has any."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned: torch.Tensor | None = None

    def take(self, count: int) -> torch.Tensor:
        """int32 [count], until they are taken again."""
        if self._pinned is None or len(self._pinned) < count:
            self._pinned = self._device.pinned((1 << (count - 1).bit_length(),), torch.int32)
        return self._pinned[:count]


class Download:
    """Words for log-probs."""

    def __init__(self, device: Device) -> None:
        self._words = PinnedWords(device)

    def download(self, words: torch.Tensor) -> np.ndarray:
        """Copies int32 [n] from the device, on the current stream: there when that is done, and
        until the next download."""
        here = self._words.take(len(words))
        here.copy_(words, non_blocking=True)
        return here.numpy()


class StepBuffers:
    """One parity. latest: the last step that was launched in them. plan: what attention made of it,
    whose memory is nobody else's until the step has ended.
    """

    def __init__(
        self, parity: int, device: Device, words: int, most_rows: int, nobody: int
    ) -> None:
        self.parity = parity
        self.latest: LaunchedStep | None = None
        self._pinned = device.pinned((words,), torch.int32)
        self.packer = Packer(self._pinned.numpy(), nobody)
        self.plan: Plan = None
        self._drawn = device.pinned((most_rows, 2), torch.int64)
        self._drawn_on_host: np.ndarray = self._drawn.numpy()
        # Cutting tensors costs as much as a copy.
        self._pieces: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: dict[int, torch.Tensor] = {}
        self.logprobs = Download(device)
        self.masks = PinnedWords(device)

    def download(self, drawn: torch.Tensor) -> np.ndarray:
        """Copies int64 [S, 2] from the device, on the current stream: there when that is done."""
        count = len(drawn)
        if count not in self._rows:
            self._rows[count] = self._drawn[:count]
        self._rows[count].copy_(drawn, non_blocking=True)
        return self._drawn_on_host[:count]

    def upload(self, words: int, target: torch.Tensor) -> None:
        """Copies the first `words`, or a few more, to the beginning of `target`, which is the same
        always, on the current stream."""
        words = min(-(-words // BLOCK) * BLOCK, len(self._pinned))
        if words not in self._pieces:
            if len(self._pieces) >= MOST_PIECES:
                self._pieces.clear()
            self._pieces[words] = target[:words], self._pinned[:words]
        there, here = self._pieces[words]
        there.copy_(here, non_blocking=True)

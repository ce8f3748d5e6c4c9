"""What is known of a step's rows becomes what is known of its tokens and pages, on the device.

Positions, places in the pool, input ids and flat page indices: nothing of it is built or uploaded
by the host. Knows arrays and one stream; the kernel is kernels/expand.py.
"""

from __future__ import annotations

import torch

from pipeinfer.kernels.expand import Expanded, allocate, expand


class Expansion:
    """Room for the largest step. It is written and read on one stream, so one is enough."""

    def __init__(self, rows: int, tokens: int, page_indices: int, device: torch.device) -> None:
        self._room = allocate(rows, tokens, page_indices, device)

    def indices(self, count: int) -> torch.Tensor:
        """Where the next step's first `count` page indices will stand, int32."""
        return self._room.page_indices[:count]

    def __call__(
        self, views: dict[str, torch.Tensor], last_token: torch.Tensor, page_size: int
    ) -> Expanded:
        """On the current stream, from the uploaded `views`: arrays of exactly the step's sizes."""
        rows, tokens = len(views["counts"]), len(views["tokens"])
        room = self._room
        step = Expanded(
            positions=room.positions[:tokens],
            places=room.places[:tokens],
            ids=room.ids[:tokens],
            token_offsets=room.token_offsets[: rows + 1],
            page_indices=room.page_indices,
            page_offsets=room.page_offsets[: rows + 1],
            seq_lens=room.seq_lens[:rows],
            last_page_len=room.last_page_len[:rows],
        )
        expand(
            views["table"].view(rows, -1), views["starts"], views["counts"], views["slots"],
            views["tokens"], last_token, page_size, step,
        )  # fmt: skip
        return step

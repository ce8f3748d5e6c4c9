"""Prompts before decodes: the shortest time to first token, at the price of the streams that run.

A steady flow of prompts stops every running request; meant for offline batches and comparisons.
"""

from __future__ import annotations

from pipeinfer.scheduler.board import Board


class PrefillFirst:
    """A step of prompts alone while there is one to compute, else a step of decodes."""

    def compose(self, board: Board) -> None:
        board.continue_prompts()
        board.admit_while_possible()
        if not board.rows:
            board.decode_all()

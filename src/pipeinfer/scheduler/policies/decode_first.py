"""Decodes before prompts: steps of decodes alone, a step of prompts only now and then.

The steadiest gap between tokens; prompts wait up to PATIENCE steps, so they never starve.
"""

from __future__ import annotations

from pipeinfer.scheduler.board import Board

PATIENCE = 8  # steps of decodes in a row while a prompt waits


class DecodeFirst:
    """Counts the steps of decodes since the last step of prompts."""

    def __init__(self) -> None:
        self._decoded = 0

    def compose(self, board: Board) -> None:
        if board.prompts_wait and self._decoded >= PATIENCE:
            self._prompts(board)
        if not board.rows:
            board.decode_all()
            self._decoded += 1
        if not board.rows:
            self._prompts(board)

    def _prompts(self, board: Board) -> None:
        board.continue_prompts()
        board.admit_while_possible()
        self._decoded = 0

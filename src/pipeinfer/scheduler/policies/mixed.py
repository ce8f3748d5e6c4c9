"""The default policy: every running request decodes in every step, prompts get the rest.

No running request waits for somebody else's prompt: what that adds to the gap between its tokens
is bounded (see step_budget.py). With nobody decoding, prompts get the whole budget.
"""

from __future__ import annotations

from pipeinfer.scheduler.board import Board


class Mixed:
    """Decodes, then half-computed prompts, then new ones."""

    def compose(self, board: Board) -> None:
        board.decode_all()
        board.spare_decodes()
        board.continue_prompts()
        board.admit_while_possible()

"""The most tokens a second, whoever waits: the default of batches.

As `mixed`, but how many tokens of prompts go beside the decodes is a question of their price alone
(see step_budget.py): a step may take as long as it likes.
"""

from __future__ import annotations

from pipeinfer.scheduler.board import Board


class Throughput:
    """Decodes, then half-computed prompts, then new ones."""

    def compose(self, board: Board) -> None:
        board.decode_all()
        board.spend_least()
        board.continue_prompts()
        board.admit_while_possible()

"""The most tokens a second, whoever waits: the default of batches.

As `mixed`, but how many tokens of prompts go beside the decodes is a question of their price alone
(see step_budget.py): a step may take as long as it likes.
"""

from __future__ import annotations

from pipeinfer.scheduler.composer import StepComposer


class Throughput:
    """Decodes, then half-computed prompts, then new ones."""

    def compose(self, step: StepComposer) -> None:
        step.decode_all()
        step.limit_prefill(cheapest=True)
        step.continue_prompts()
        step.admit_while_possible()

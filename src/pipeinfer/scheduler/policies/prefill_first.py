"""Prompts before decodes: the shortest time to first token, at the price of the streams that run.

A steady flow of prompts stops every running request; meant for offline batches and comparisons.
"""

from __future__ import annotations

from pipeinfer.scheduler.composer import StepComposer


class PrefillFirst:
    """A step of prompts alone while there is one to compute, else a step of decodes."""

    def compose(self, step: StepComposer) -> None:
        step.continue_prompts()
        step.admit_while_possible()
        if not step.rows:
            step.decode_all()

"""Decodes before prompts: steps of decodes alone, a step of prompts only now and then.

The steadiest gap between tokens; prompts wait up to PATIENCE steps, so they never starve.
"""

from __future__ import annotations

from pipeinfer.scheduler.composer import StepComposer

PATIENCE = 8  # steps of decodes in a row while a prompt waits


class DecodeFirst:
    """Counts the steps of decodes since the last step of prompts."""

    def __init__(self) -> None:
        self._decoded = 0

    def compose(self, step: StepComposer) -> None:
        if step.prompts_wait and self._decoded >= PATIENCE:
            self._prompts(step)
        if not step.rows:
            step.decode_all()
            self._decoded += 1
        if not step.rows:
            self._prompts(step)

    def _prompts(self, step: StepComposer) -> None:
        step.continue_prompts()
        step.admit_while_possible()
        self._decoded = 0

"""The default policy: every running request decodes in every step, prompts get the rest.

No running request waits for somebody else's prompt: what that adds to the gap between its tokens
is bounded (see step_budget.py). With nobody decoding, prompts get the whole budget.
"""

from __future__ import annotations

from pipeinfer.scheduler.composer import StepComposer


class Mixed:
    """Decodes, then half-computed prompts, then new ones."""

    def compose(self, step: StepComposer) -> None:
        step.decode_all()
        step.limit_prefill()
        step.continue_prompts()
        step.admit_while_possible()

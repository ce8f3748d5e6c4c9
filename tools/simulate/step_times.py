"""What a simulated engine says of its steps, as one on a GPU does after it measured them.

Knows the step model, and the sizes that engines measure.
"""

from __future__ import annotations

from pipeinfer.step_cost import PER_SECOND, StepCost, measured_sizes
from simulate.step_model import StepModel

ROWS = 1, 8, 16, 32, 64, 96, 128, 192, 256  # of decodes alone
BESIDE = 64  # decodes without context in a step with a prompt, at most half of its tokens
DEPTH = 2048  # tokens of the prompt before those whose price is measured


def step_cost(model: StepModel, most: int) -> StepCost:
    """Of steps of up to `most` tokens, without scatter."""

    def amid(tokens: int, before: int) -> int:
        decodes = min(BESIDE, tokens // 2)
        prompt = tokens - decodes
        pairs = prompt * before + prompt * (prompt + 1) // 2
        return round(model.seconds(decodes, decodes, prompt, pairs) * PER_SECOND)

    mixed = tuple(
        (tokens, amid(tokens, 0), (amid(tokens, DEPTH) - amid(tokens, 0)) // DEPTH)
        for tokens in measured_sizes(most)
    )
    decodes = tuple((rows, round(model.seconds(rows, rows) * PER_SECOND)) for rows in ROWS)
    return StepCost(decodes, mixed, round(model.context * PER_SECOND))

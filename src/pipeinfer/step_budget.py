"""How many tokens of prompts a step holds in which requests decode.

Few enough that the streams hardly notice, enough that the weights are not read for a few tokens.
Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeinfer.step_cost import StepCost

PART = 16  # of a step's budget
LEAST = 128
LEAST_PROMPT_PART = 4  # of a fixed budget, for prompts
# A step with prompts may take so many percent of what its decodes take alone, which is long where
# many run, with long contexts,
SLOWER = 150
# or of what that many decodes without context take, which few others take less than; but then it
# has no more tokens than these.
SHORT_SLOWER, SHORT_ROWS, SHORT_TOKENS = 215, 64, 512
FEWEST = 128  # tokens of prompts, however long they take: with less, hardly any time is saved
# But the matrix kernels of a GPU take steps: where a few tokens less take far less time, prompts
# get those, and at least so many. A token is worth so many percent of the least that one can take.
ROOM, WORTH = 32, 75
MOST_MEASURED = 1024  # tokens of a step: with more, the time for each hardly falls


@dataclass(frozen=True)
class MixedBudget:
    """Of the steps of one epoch. tokens: of a step with its decodes, where no `cost` is known."""

    tokens: int
    cost: StepCost | None = None

    def prompts(self, rows: int, context: int, depth: int) -> int:
        """Tokens of prompts, at least 1, beside `rows` decodes that have `context` tokens before
        all of them; the first prompt has `depth` before.
        """
        if self.cost is None:
            return max(self.tokens - rows, self.tokens // LEAST_PROMPT_PART, 1)
        own = self.cost.tokens_within(SLOWER, rows, context, depth)
        # However deep the prompt: fewer tokens at a time would only make it disturb for longer.
        short = min(self.cost.tokens_within(SHORT_SLOWER, SHORT_ROWS, 0, 0), SHORT_TOKENS)
        most = max(own, short, rows + FEWEST)
        return self.cost.worthwhile(most, rows, ROOM, WORTH) - rows


def mixed_budget(asked: int, budget: int, cost: StepCost | None = None) -> MixedBudget:
    """`asked` (--mixed-step-tokens) comes first, then what the engine measured; without either it
    is a part of `budget`, the most tokens of any step, and never more than that.
    """
    if asked:
        return MixedBudget(min(asked, budget))
    return MixedBudget(min(max(budget // PART, LEAST), budget), cost)


def most_tokens(asked: int, budget: int) -> int:
    """Of a step that decodes, where its device is measured: what graphs are to be captured for."""
    return min(asked or MOST_MEASURED, budget)

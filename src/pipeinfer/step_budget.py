"""How many tokens a step holds in which requests decode, beside prompts.

Few enough that the streams hardly notice, enough that the weights are not read for a few tokens.
Knows numbers only.
"""

from __future__ import annotations

PART = 16  # of a step's budget
LEAST = 128


def mixed_budget(asked: int, budget: int) -> int:
    """Tokens of a step that decodes: `asked` (--mixed-step-tokens, or what the engine measured), or
    if that is 0 a part of `budget`, the most tokens of any step; never more than that.
    """
    return min(asked or max(budget // PART, LEAST), budget)

"""Which choices of a prompt are shown where more were made: those that the model finds likeliest.

Counts the log-prob of a token, in the mean over a choice's tokens, as OpenAI says of `best_of`.
Knows deltas; no shapes and no HTTP.
"""

from __future__ import annotations

import msgspec

from pipeinfer.gateway.events import Delta
from pipeinfer.gateway.token_scores import token_scores


class BestOf:
    """Shows `shown` of every `made` choices in a row; of `choices` in all. Nobody but this wants
    the log-probs unless they are `wanted`."""

    def __init__(self, choices: int, made: int, shown: int, wanted: bool) -> None:
        self._made, self._shown, self._wanted = made, shown, wanted
        self._sums = [0.0] * choices
        self._tokens = [0] * choices

    def add(self, index: int, delta: Delta) -> Delta:
        """Counts what came of a choice; returns what its client asked for of that."""
        if delta.logprobs is None:
            return delta
        for score in token_scores([(delta.logprobs, delta.ids)]):
            self._sums[index] += score.own.logprob
            self._tokens[index] += 1
        return delta if self._wanted else msgspec.structs.replace(delta, logprobs=None)

    def best_choices(self) -> list[int]:
        """The choices that are shown, each prompt's best first; of equals the earlier. One without
        a token is worse than any other."""
        found: list[int] = []
        for first in range(0, len(self._sums), self._made):
            ranked = sorted(range(first, first + self._made), key=self._mean, reverse=True)
            found += ranked[: self._shown]
        return found

    def _mean(self, index: int) -> float:
        tokens = self._tokens[index]
        return self._sums[index] / tokens if tokens else float("-inf")

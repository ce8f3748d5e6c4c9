"""Which requests have draft tokens verified, and how many of them (speculative decoding).

Engines have the flags --speculate, --num-speculative-tokens (Drafter.max_drafts) and
--speculative-max-requests (Drafter.max_rows), and send their limits in Hello. The device makes the
drafts, out of a request's own tokens (Kernels.propose_ngrams) or by a small model
(engine/draft_model.py). The scheduler decides which requests draft.

With n-grams a request drafts if its latest tokens would have been predicted. That costs one look
into a table for each token, so a request that does not repeat itself pays no more for drafts. With
a model every request drafts at first; a request whose drafts are mostly rejected tries again after
a while. The decisions follow from tokens, plans and results alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeinfer.core import ACCEPTED_AT
from pipeinfer.params import NO_PENALTIES, penalties
from pipeinfer.scheduler.request import Request
from pipeinfer.wire import unpack

RATE_STEP = 1 / 4  # how much one token changes the rate of right predictions
# Least rate at which n-grams' drafts are worth their computation: one right prediction reaches it,
# five wrong ones in a row fall below it. At this rate four drafts give 0.33 tokens more a step. A
# step of five tokens takes 1.02 times as long as one of one token on a CPU in float32, 1.05 times
# on an H200 with 1 and 8 requests of 14B, and 1.57 times on a CPU in bfloat16 without AMX
# (measured); there it loses a little at exactly this rate, and texts that repeat themselves lie far
# above.
MIN_RATE = 0.25
# Least rate of accepted drafts at which a model's drafts are worth their computation. Estimated,
# not measured: four drafts of a model of 0.6B beside one of 14B make a step 1.8 times as long.
MIN_ACCEPTED = 0.25
# Added to a request's rate of accepted drafts in each step in which it could draft and does not, so
# that a request whose drafts were rejected tries again after some tens of tokens.
RECOVERY = 1 / 500


class NgramForecast:
    """A forecast by n-grams for one request: how often the last pair of tokens would have predicted
    the next token.

    Attributes:
    - rate: rate of right predictions among the latest tokens, 0 to 1
    - seen: tokens so far
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.seen = 0  # tokens
        # by pair of tokens: the token that followed it last
        self._next: dict[tuple[int, int], int] = {}
        self._pair = -1, -1

    def add(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens of the request."""
        following, pair, rate = self._next, self._pair, self.rate
        for token in tokens:
            rate += RATE_STEP * ((following.get(pair) == token) - rate)
            following[pair] = token
            pair = pair[1], token
        self._pair, self.rate, self.seen = pair, rate, self.seen + len(tokens)


class Drafter:
    """Chooses the requests that draft in a step.

    Attributes:
    - max_drafts: most draft tokens of a row; 0 if the engine verifies none
    - max_rows: decodes of a step up to which there are drafts; beyond, a step's time grows with its
      tokens
    - model: a model makes the drafts, not n-grams
    - min_rate: rate of right predictions (NgramForecast) from which on a request drafts. A model's
      drafts use MIN_ACCEPTED instead, unless this is 0, with which every request drafts always
    """

    __transient__ = ("_forecasts",)  # a function of the requests' tokens

    def __init__(self) -> None:
        self.max_drafts = self.max_rows = 0
        self.model = False
        self.min_rate = MIN_RATE
        self._forecasts: dict[Request, NgramForecast] = {}

    def begin(self, max_drafts: int, max_rows: int, model: bool) -> None:
        """An epoch begins on engines that verify up to `max_drafts` drafts, made by a model or by
        n-grams."""
        self.max_drafts, self.max_rows, self.model = max_drafts, max_rows, model

    def choose(self, decodes: Sequence[Request]) -> Iterator[tuple[int, int]]:
        """Yields (index, most drafts) of those of the step's `decodes` that draft."""
        if not 0 < len(decodes) <= self.max_rows or not self.max_drafts:
            return
        if not self.model:
            self._forecasts = {
                request: self._forecasts.get(request) or NgramForecast() for request in decodes
            }
        for index, request in enumerate(decodes):
            if can_draft(request) and self._worthwhile(request):
                # Less than `remaining_decodes` of core.py by the token that a row without drafts
                # decodes, written out on the hot path.
                drafts = min(self.max_drafts, request.max_total - 2 - request.projected)
                if drafts > 0:
                    yield index, drafts

    def _worthwhile(self, request: Request) -> bool:
        if not self.model:
            return self._rate(request) >= self.min_rate
        if request.draft_rate >= min(self.min_rate, MIN_ACCEPTED):
            return True
        request.draft_rate += RECOVERY
        return False

    def _rate(self, request: Request) -> float:
        forecast = self._forecasts[request]
        if not forecast.seen:
            forecast.add(unpack(request.work.prompt_ids).tolist())
        outputs = forecast.seen - request.prompt_len
        forecast.add(request.outputs[outputs:])
        return forecast.rate


def can_draft(request: Request) -> bool:
    """Whether draft tokens of `request` can be verified. They cannot if sampling a token changes
    how the next one is sampled (penalties, grammars, reasoning budgets, bad words of several
    tokens), or if nothing is sampled (vectors)."""
    params = request.work.params
    bad_words = any(len(ids) > 1 for ids in request.work.bad_word_ids)
    counted = penalties(params) != NO_PENALTIES or bad_words
    restricted = params.structured_outputs is not None or params.thinking_token_budget is not None
    return not (counted or restricted or params.vector_size)


class DraftCounts:
    """Counts of draft tokens over all epochs.

    Attributes:
    - drafted: draft tokens that were verified
    - accepted: accepted draft tokens by their position in the row, from 0
    """

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted: list[int] = [0]

    def add(self, drafts: int, accepted: int) -> None:
        """Counts a row that had `drafts` draft tokens, `accepted` of them accepted."""
        self.drafted += drafts
        self.accepted += [0] * (drafts - len(self.accepted))
        for position in range(accepted):
            self.accepted[position] += 1

    def statistics(self) -> dict[str, float]:
        """Statistics for the heartbeat; docs/reference/statistics.md lists them."""
        found: dict[str, float] = {
            "draft_tokens_total": self.drafted,
            "accepted_draft_tokens_total": sum(self.accepted),
        }
        for position, count in enumerate(self.accepted):
            found[f"{ACCEPTED_AT}{position}"] = count
        return found

"""Costs of steps on a device, and the number of prompt tokens that a step holds beside decodes.

`StepCost` is measured by an engine at its start, in whole numbers of picoseconds, so that a
scheduler computes the same numbers in a replay. `PrefillBudget` decides by it: so few tokens of
prompts that the streams hardly notice, while prompts need not wait for it. The more prompts wait,
the longer a step may take, up to a target: then prompts are computed at the GPU's rate. For
throughput, where no client waits for single tokens, it chooses the cheapest number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

PER_SECOND = 10**12  # picoseconds
# Tokens of the steps with prompts that engines measure, and capture. Matrix kernels compute whole
# tiles of 64 or 128 rows. Kernels of steps beyond 2,048 run longer than it takes to launch them;
# but in a graph, both kinds of attention run at once.
MEASURED_TOKENS = (
    64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
    12_288, 16_384,
)  # fmt: skip


def measured_sizes(max_tokens: int) -> tuple[int, ...]:
    """The sizes of MEASURED_TOKENS up to `max_tokens`, and `max_tokens` itself if it is not larger
    than all."""
    sizes = {tokens for tokens in MEASURED_TOKENS if tokens <= max_tokens}
    return tuple(sorted(sizes | {max_tokens} if max_tokens < MEASURED_TOKENS[-1] else sizes))


class Prompt(NamedTuple):
    """A prompt that waits, or a part of one.

    Attributes:
    - tokens: to compute
    - before: tokens before them that were computed
    - age: seconds since the prompt came
    """

    tokens: int
    before: int = 0
    age: float = 0.0


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """Durations of steps, in picoseconds, for steps and prompts with hardly any context.

    Attributes:
    - decodes: (rows, time) of steps of decodes alone, ascending in rows, not empty
    - mixed: (tokens, time, per_prior) of steps of `tokens` tokens, up to the most of any step, of
      which a few are decodes and the rest is of a prompt; `per_prior` is added for each token of
      that prompt that was computed before. Ascending in tokens, not empty
    - kv_token: for each token of context that a decode reads
    """

    decodes: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, int], ...]
    kv_token: int = 0

    def __str__(self) -> str:
        """The costs in milliseconds, for a person."""
        decodes = ", ".join(f"{rows} {_ms(time)}" for rows, time in self.decodes)
        mixed = ", ".join(
            f"{tokens} {_ms(time)} + {_ms(1000 * per_prior)} per 1,000 tokens before"
            for tokens, time, per_prior in self.mixed
        )
        context = _ms(1000 * self.kv_token)
        return f"decodes {decodes}, {context} per 1,000 tokens of context; with prompts {mixed}"

    def limited_to(self, tokens: int) -> StepCost:
        """A copy with the sizes of at most `tokens` tokens, or the smallest size if all have
        more."""
        sizes = tuple(size for size in self.mixed if size[0] <= tokens)
        return msgspec.structs.replace(self, mixed=sizes or self.mixed[:1])

    def decode_time(self, rows: int) -> int:
        """Picoseconds of a step of `rows` decodes alone: those of the largest measured size with at
        most `rows` rows, or of the smallest size."""
        time = self.decodes[0][1]
        for measured, measured_time in self.decodes:
            if measured > rows:
                break
            time = measured_time
        return time

    def tokens_within(self, percent: int, rows: int, context: int, depth: int) -> int:
        """The most tokens of a step that takes at most `percent` of the time of its decodes alone;
        0 if even the smallest measured step takes more.

        - rows: decodes of the step
        - context: tokens before all decodes together
        - depth: tokens of the prompt that were computed before
        """
        context_time = context * self.kv_token
        limit = (self.decode_time(rows) + context_time) * percent // 100 - context_time
        fitting = (
            tokens for tokens, time, per_prior in self.mixed if time + per_prior * depth <= limit
        )
        return max(fitting, default=0)

    def tokens_as_cheap_as(self, tokens: int, percent: int) -> int:
        """The most tokens of a step that takes at most `percent` of the time of one of `tokens`
        tokens; 0 if all that were measured have fewer."""
        limit = next((time for size, time, _ in self.mixed if size >= tokens), 0) * percent // 100
        return max((size for size, time, _ in self.mixed if time <= limit), default=0)

    def mixed_steps(
        self, rows: int, context: int, prompts: Sequence[Prompt]
    ) -> Iterator[tuple[int, int]]:
        """Yields (tokens, time) of each measured size that holds `rows` decodes and as much of
        `prompts` as fits, in their order; up to the size that holds all.

        - context: tokens before all decodes together
        """
        context_time = context * self.kv_token
        waiting, total = iter(prompts), sum([prompt.tokens for prompt in prompts])
        taken = pairs = remaining = before = 0
        for tokens, time, per_prior in self.mixed:
            capacity = min(tokens - rows, total)
            while taken < capacity:
                if not remaining:
                    remaining, before, _ = next(waiting)
                part = min(remaining, capacity - taken)
                pairs += part * before + part * part // 2
                taken, remaining, before = taken + part, remaining - part, before + part
            if taken:
                # In the measurement all tokens are of one prompt that begins.
                extra_pairs = pairs - tokens * tokens // 2
                yield tokens, time + context_time + per_prior * extra_pairs // tokens
            if taken == total:
                return

    def best_size(self, max_tokens: int, rows: int, min_prompt_tokens: int, percent: int) -> int:
        """The size of at most `max_tokens` tokens in which prompts beside `rows` decodes, at least
        `min_prompt_tokens` tokens of them, gain most; `max_tokens` if they gain in none.

        A token of a prompt is worth `percent` of the least time per token of any size; its cost is
        the time that the step takes longer than its decodes alone.
        """
        decode_time = self.decode_time(rows)
        token_worth = min(time // tokens for tokens, time, _ in self.mixed) * percent // 100
        best_gain, best_tokens = 0, max_tokens
        for tokens, time, _ in self.mixed:
            gain = token_worth * (tokens - rows) - (time - decode_time)
            if rows + min_prompt_tokens <= tokens <= max_tokens and gain > best_gain:
                best_gain, best_tokens = gain, tokens
        return best_tokens


def _ms(picoseconds: int) -> str:
    return f"{picoseconds / 10**9:.3f}"


# ------------------------------------------------------- tokens of prompts beside decodes

# Without measurements and settings the budget is this part of a step's token budget, and at least
# MIN_BUDGET tokens.
BUDGET_DIVISOR = 16
MIN_BUDGET = 128
# Part of a fixed budget that is left for prompts, however many requests decode.
PROMPT_DIVISOR = 4
# Most time of a step with prompts, in percent of the time of its decodes alone, which is long with
# many requests and long contexts.
SLOWDOWN_PERCENT = 150
# Or, for a step of at most SHORT_TOKENS tokens, in percent of the time of SHORT_ROWS decodes
# without context, which hardly any step falls below.
SHORT_SLOWDOWN_PERCENT = 215
SHORT_ROWS = 64
SHORT_TOKENS = 512
# Least tokens of prompts, however long they take: with fewer, hardly any time is saved.
MIN_PROMPT_TOKENS = 128
# The time of a GPU's matrix kernels grows in steps: if slightly fewer tokens take far less time,
# prompts get these fewer, but at least MIN_PROMPT_ROWS.
MIN_PROMPT_ROWS = 32
# Worth of a token of a prompt, in percent of the least time per token.
TOKEN_WORTH_PERCENT = 75
# Streams, and tokens of context of each, for which the tokens allowed by the targets are logged.
LOGGED_STREAMS = 64
LOGGED_CONTEXT = 1000
# Most tokens of a step that streams hardly notice: with more, the time for each hardly falls.
MAX_UNNOTICED_TOKENS = 1024


@dataclass(frozen=True)
class Targets:
    """Targets of steps beside streams.

    Attributes:
    - itl: seconds of the longest step that streams should feel; 0: no bound
    - ttft: seconds that a prompt should wait at most; 0: as long as it takes
    """

    itl: float = 0.0
    ttft: float = 0.0

    @property
    def longest(self) -> float:
        """Most picoseconds of a step beside streams; infinite without a bound."""
        return self.itl * PER_SECOND or float("inf")


NO_TARGETS = Targets()


@dataclass(frozen=True)
class PrefillBudget:
    """The number of prompt tokens that the steps of one epoch hold.

    Attributes:
    - tokens: of a step with its decodes, if no `cost` is known
    - cost: of steps, as measured
    - small: the sizes of `cost` that streams hardly notice, whatever waits
    - targets: of streams and prompts
    """

    tokens: int
    cost: StepCost | None = None
    small: StepCost | None = None
    targets: Targets = NO_TARGETS

    @property
    def looks_ahead(self) -> bool:
        """Whether the budget depends on the prompts that wait after the first."""
        return self.cost is not None and self.targets.ttft > 0

    def prompt_tokens(self, rows: int, context: int, waiting: Sequence[Prompt] = ()) -> int:
        """Number of prompt tokens, at least 1, of a step with `rows` decodes.

        Arguments:
        - context: tokens of context of all decodes together
        - waiting: all prompts, in the order in which they will be computed; the first is enough
          unless the budget `looks_ahead`
        """
        if self.cost is None or self.small is None:
            return max(self.tokens - rows, self.tokens // PROMPT_DIVISOR, 1)
        unnoticed = _unnoticed_prompt_tokens(
            self.small, rows, context, waiting[0].before if waiting else 0
        )
        if not self.looks_ahead:
            return unnoticed
        in_time = self._in_time(self.cost, rows, context, waiting)
        return max(unnoticed, in_time - rows)

    def best_rate_prompt_tokens(
        self, rows: int, context: int, waiting: Sequence[Prompt], steps_left: int
    ) -> int:
        """The number of prompt tokens with the least cost per token, at least MIN_PROMPT_TOKENS if
        there are as many. Without measurements, as `prompt_tokens`.

        The cost of a token is the time that the step takes longer than its decodes are worth. If
        all prompts will be computed beside decodes that run anyway, decodes are worth the time that
        they take alone. Otherwise steps should be full: then each decode is worth its share of the
        largest step of decodes.

        Arguments:
        - context: tokens of context of all decodes together
        - waiting: all prompts that wait
        - steps_left: steps that the longest of the decodes will still take; 0 if more prompts wait
          than there is room for
        """
        if self.cost is None:
            return self.prompt_tokens(rows, context, waiting)
        sizes = [(tokens - rows, time) for tokens, time in self.cost.mixed_steps(rows, 0, waiting)]
        total, decode_time = sum([prompt.tokens for prompt in waiting]), self.cost.decode_time(rows)
        found = _best_rate(sizes, total, decode_time)
        if total > found * steps_left:
            most_rows, time = self.cost.decodes[-1]
            found = _best_rate(sizes, total, min(rows * time // most_rows, decode_time))
        return found

    def within_itl_target(
        self, rows: int = LOGGED_STREAMS, context: int = LOGGED_STREAMS * LOGGED_CONTEXT
    ) -> tuple[int, float]:
        """Returns (tokens, prompt tokens a second) of the longest steps within the target of
        streams, for prompts that begin; 0 and 0.0 if step times are not known, or no step is within
        it."""
        if self.cost is None:
            return 0, 0.0
        sizes = self.cost.mixed_steps(rows, context, [Prompt(self.cost.mixed[-1][0])])
        within = (one for one in sizes if one[1] <= self.targets.longest)
        tokens, time = max(within, default=(0, 1))
        return tokens, PER_SECOND * max(tokens - rows, 0) / time

    def _in_time(self, cost: StepCost, rows: int, context: int, waiting: Sequence[Prompt]) -> int:
        """Number of tokens of the shortest step with which all prompts meet their target, if all
        steps were like it; if there is none, of the longest step. Only steps within the target of
        streams count. 0: there is none."""
        pace = self._pace(waiting) / PER_SECOND
        longest = self.targets.longest
        shortest, enough, largest = float("inf"), 0, 0
        for tokens, time in cost.mixed_steps(rows, context, waiting):
            if time > longest:
                continue
            largest = tokens
            if tokens - rows >= pace * time and time < shortest:
                shortest, enough = time, tokens
        return enough or largest

    def _pace(self, waiting: Sequence[Prompt]) -> float:
        """The least tokens a second with which every prompt is computed in time; infinite if one is
        late."""
        target, pace, before = self.targets.ttft, 0.0, 0
        for prompt in waiting:
            before += prompt.tokens
            seconds_left = target - prompt.age
            if seconds_left <= 0:
                return float("inf")
            pace = max(pace, before / seconds_left)
        return pace


def describe_targets(targets: Targets, tokens: float, rate: float) -> str:
    """The effect of the targets, for the log. tokens, rate: of
    PrefillBudget.within_itl_target()."""
    if not targets.ttft:
        return "no --ttft-target: steps beside streams are short, however many prompts wait"
    itl = f"{1e3 * targets.itl:g} ms" if targets.itl else "no bound"
    return f"{describe_rate(tokens, rate)} (--itl-target {itl}, --ttft-target {targets.ttft:g} s)"


def describe_rate(tokens: float, rate: float) -> str:
    """The effect of the targets without their values, for the log."""
    if not tokens:
        return (
            "steps beside streams stay short: how long steps take was not measured, which happens "
            "on GPUs alone, or --itl-target leaves prompts nothing more"
        )
    return (
        f"while prompts wait, steps of up to {tokens:,.0f} tokens beside {LOGGED_STREAMS} streams, "
        f"{rate:,.0f} prompt tokens a second"
    )


def prefill_budget(
    fixed_tokens: int, budget: int, cost: StepCost | None = None, targets: Targets = NO_TARGETS
) -> PrefillBudget:
    """The budget of an epoch.

    `fixed_tokens` (--mixed-step-tokens) has precedence, then the engine's measurement `cost`;
    without either the budget is a part of `budget`, the most tokens of any step, and never more
    than that.
    """
    if fixed_tokens:
        return PrefillBudget(min(fixed_tokens, budget))
    tokens = min(max(budget // BUDGET_DIVISOR, MIN_BUDGET), budget)
    small = None if cost is None else cost.limited_to(MAX_UNNOTICED_TOKENS)
    return PrefillBudget(tokens, cost, small, targets)


def _unnoticed_prompt_tokens(cost: StepCost, rows: int, context: int, prior_tokens: int) -> int:
    """Number of prompt tokens beside `rows` decodes that streams hardly notice; `prior_tokens` of
    the first prompt were computed before."""
    limit_here = cost.tokens_within(SLOWDOWN_PERCENT, rows, context, prior_tokens)
    # Independent of the prompt's depth: with fewer tokens at a time it would only disturb for
    # longer.
    short = min(cost.tokens_within(SHORT_SLOWDOWN_PERCENT, SHORT_ROWS, 0, 0), SHORT_TOKENS)
    max_tokens = max(limit_here, short, rows + MIN_PROMPT_TOKENS)
    if not short and not cost.tokens_within(SLOWDOWN_PERCENT, rows, 0, 0):
        # Even the smallest step takes longer, for instance if kernels are launched one by one: then
        # as many tokens as take hardly longer than that.
        max_tokens = max(
            max_tokens, cost.tokens_as_cheap_as(rows + MIN_PROMPT_TOKENS, SLOWDOWN_PERCENT)
        )
    return cost.best_size(max_tokens, rows, MIN_PROMPT_ROWS, TOKEN_WORTH_PERCENT) - rows


def _best_rate(sizes: Sequence[tuple[int, int]], total: int, decode_worth: int) -> int:
    """The number of prompt tokens, of those in `sizes` (tokens of prompts, time), with the least
    cost per token; `total` tokens of prompts wait."""
    enough = [size for size in sizes if size[0] >= min(MIN_PROMPT_TOKENS, total)]
    if not enough:
        return MIN_PROMPT_TOKENS
    return min(enough, key=lambda size: (size[1] - decode_worth) / min(size[0], total))[0]


def max_graph_tokens(fixed_tokens: int, budget: int) -> int:
    """Most tokens of a step with decodes on a measured device: the size up to which graphs are
    captured.

    - fixed_tokens: --mixed-step-tokens
    - budget: the most tokens of any step
    """
    return min(fixed_tokens or budget, budget)

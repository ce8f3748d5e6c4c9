"""What steps take on a device, and how many tokens of prompts a step holds beside decodes.

`StepCost` is what an engine measured at its start, in whole numbers of picoseconds, so that a
scheduler counts in a replay what it counted before. `PrefillBudget` decides by it: so few tokens of
prompts that the streams hardly notice, while prompts need not wait for it. The more prompts wait,
the longer a step may take, up to a target: then prompts are computed at the GPU's rate. Or, where
nobody waits for single tokens, as many tokens as cost least.
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
    """MEASURED_TOKENS up to `max_tokens`, and `max_tokens` itself if it is not larger than all."""
    sizes = {tokens for tokens in MEASURED_TOKENS if tokens <= max_tokens}
    return tuple(sorted(sizes | {max_tokens} if max_tokens < MEASURED_TOKENS[-1] else sizes))


class Prompt(NamedTuple):
    """A prompt that waits, or a part of one.

    Attributes:
    - tokens: to compute
    - before: tokens before them that were computed
    - age: seconds since it came
    """

    tokens: int
    before: int = 0
    age: float = 0.0


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """Picoseconds. Steps and prompts are at their beginning: with hardly any context.

    Attributes:
    - decodes: (rows, time) of steps of decodes alone, ascending in rows, not empty
    - mixed: (tokens, time, per_prior) of steps of so many tokens, up to the most of any step, of
      which a few are decodes and the rest is of a prompt; `per_prior` comes on top for each token
      of that prompt that was computed before. Ascending in tokens, not empty
    - kv_token: for each token of context that a decode reads
    """

    decodes: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, int], ...]
    kv_token: int = 0

    def __str__(self) -> str:
        """In milliseconds, for a person."""
        decodes = ", ".join(f"{rows} {_ms(time)}" for rows, time in self.decodes)
        mixed = ", ".join(
            f"{tokens} {_ms(time)} + {_ms(1000 * per_prior)} per 1,000 tokens before"
            for tokens, time, per_prior in self.mixed
        )
        context = _ms(1000 * self.kv_token)
        return f"decodes {decodes}, {context} per 1,000 tokens of context; with prompts {mixed}"

    def limited_to(self, tokens: int) -> StepCost:
        """The same with the sizes of at most `tokens` tokens, or the smallest if all have more."""
        sizes = tuple(size for size in self.mixed if size[0] <= tokens)
        return msgspec.structs.replace(self, mixed=sizes or self.mixed[:1])

    def decode_time(self, rows: int) -> int:
        """Picoseconds of a step of `rows` decodes alone: as measured with the most rows that are
        not more, if any are."""
        time = self.decodes[0][1]
        for measured, measured_time in self.decodes:
            if measured > rows:
                break
            time = measured_time
        return time

    def tokens_within(self, percent: int, rows: int, context: int, depth: int) -> int:
        """The most tokens of a step that takes at most `percent` of what its decodes take alone;
        0 if even the fewest take more. Of `rows` decodes with `context` tokens before all of them,
        and of a prompt with `depth` tokens before.
        """
        context_time = context * self.kv_token
        limit = (self.decode_time(rows) + context_time) * percent // 100 - context_time
        fitting = (
            tokens for tokens, time, per_prior in self.mixed if time + per_prior * depth <= limit
        )
        return max(fitting, default=0)

    def tokens_as_cheap_as(self, tokens: int, percent: int) -> int:
        """The most tokens of a step that takes at most `percent` of what one of `tokens` takes; 0
        if all that were measured have fewer."""
        limit = next((time for size, time, _ in self.mixed if size >= tokens), 0) * percent // 100
        return max((size for size, time, _ in self.mixed if time <= limit), default=0)

    def mixed_steps(
        self, rows: int, context: int, prompts: Sequence[Prompt]
    ) -> Iterator[tuple[int, int]]:
        """(tokens, time) of each size that holds `rows` decodes, with `context` tokens before all
        of them, and as much of `prompts` as fits, in their order; up to the size that holds all.
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
                # As measured, all tokens are of one prompt that begins.
                extra_pairs = pairs - tokens * tokens // 2
                yield tokens, time + context_time + per_prior * extra_pairs // tokens
            if taken == total:
                return

    def best_size(self, max_tokens: int, rows: int, min_prompt_tokens: int, percent: int) -> int:
        """The size of at most `max_tokens` tokens in which prompts beside `rows` decodes, at least
        `min_prompt_tokens` tokens of them, gain most; `max_tokens` if they gain in none.

        A token of a prompt is worth `percent` of what one takes in the size that is cheapest by the
        token; it costs what the step takes longer than its decodes alone.
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

# Without measurements and settings: part of a step's token budget, and tokens at least.
BUDGET_DIVISOR = 16
MIN_BUDGET = 128
# Part of a fixed budget that is left for prompts, however many requests decode.
PROMPT_DIVISOR = 4
# Percent of what its decodes take alone that a step with prompts may take, which is long where many
# run, with long contexts.
SLOWDOWN_PERCENT = 150
# Or percent of what so many decodes without context take, which few others take less than; but then
# the step has at most so many tokens.
SHORT_SLOWDOWN_PERCENT = 215
SHORT_ROWS = 64
SHORT_TOKENS = 512
# Tokens of prompts, however long they take: with less, hardly any time is saved.
MIN_PROMPT_TOKENS = 128
# The matrix kernels of a GPU take steps: where a few tokens less take far less time, prompts get
# those, and at least so many tokens.
MIN_PROMPT_ROWS = 32
# Percent of the least time that one token can take: what a token of a prompt is worth.
TOKEN_WORTH_PERCENT = 75
# Streams, and tokens of context of each, for which it is logged what the targets allow.
LOGGED_STREAMS = 64
LOGGED_CONTEXT = 1000
# Most tokens of a step that streams hardly notice: with more, the time for each hardly falls.
MAX_UNNOTICED_TOKENS = 1024


@dataclass(frozen=True)
class Targets:
    """What steps beside streams aim at.

    Attributes:
    - itl: seconds of the longest step that streams should feel; 0: no bound
    - ttft: seconds that a prompt should wait at most; 0: as long as it takes
    """

    itl: float = 0.0
    ttft: float = 0.0

    @property
    def longest(self) -> float:
        """Picoseconds of a step beside streams."""
        return self.itl * PER_SECOND or float("inf")


NO_TARGETS = Targets()


@dataclass(frozen=True)
class PrefillBudget:
    """How many tokens of prompts the steps of one epoch hold.

    Attributes:
    - tokens: of a step with its decodes, where no `cost` is known
    - cost: of steps, as measured
    - small: of `cost` the sizes that streams hardly notice, whatever waits
    - targets: of streams and prompts
    """

    tokens: int
    cost: StepCost | None = None
    small: StepCost | None = None
    targets: Targets = NO_TARGETS

    @property
    def looks_ahead(self) -> bool:
        """Whether it matters which prompts wait behind the first."""
        return self.cost is not None and self.targets.ttft > 0

    def prompt_tokens(self, rows: int, context: int, waiting: Sequence[Prompt] = ()) -> int:
        """Tokens of prompts, at least 1, of a step with `rows` decodes.

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
        """The number of tokens of prompts that cost least each, at least MIN_PROMPT_TOKENS if there
        are as many. Where nothing was measured, as `prompt_tokens`.

        A token costs what the step takes longer than its decodes are worth. If all prompts will be
        computed beside decodes that run anyway, that is what these take alone. Else steps should
        be full: then each decode is worth its share of the largest step of decodes.

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
        """(tokens, prompt tokens a second) of the longest steps within the target of streams, for
        prompts that begin; 0 and 0.0 where step times are not known, or no step is within it."""
        if self.cost is None:
            return 0, 0.0
        sizes = self.cost.mixed_steps(rows, context, [Prompt(self.cost.mixed[-1][0])])
        within = (one for one in sizes if one[1] <= self.targets.longest)
        tokens, time = max(within, default=(0, 1))
        return tokens, PER_SECOND * max(tokens - rows, 0) / time

    def _in_time(self, cost: StepCost, rows: int, context: int, waiting: Sequence[Prompt]) -> int:
        """Tokens of the shortest step with which all prompts meet their target, if all steps were
        like it, or else of the longest; of those within the target of streams. 0: there is none."""
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
        """Tokens a second with which every prompt is computed in time; infinite if one is late."""
        target, pace, before = self.targets.ttft, 0.0, 0
        for prompt in waiting:
            before += prompt.tokens
            seconds_left = target - prompt.age
            if seconds_left <= 0:
                return float("inf")
            pace = max(pace, before / seconds_left)
        return pace


def describe_targets(targets: Targets, tokens: float, rate: float) -> str:
    """For the log. tokens, rate: of PrefillBudget.within_itl_target()."""
    if not targets.ttft:
        return "no --ttft-target: steps beside streams are short, however many prompts wait"
    itl = f"{1e3 * targets.itl:g} ms" if targets.itl else "no bound"
    return f"{describe_rate(tokens, rate)} (--itl-target {itl}, --ttft-target {targets.ttft:g} s)"


def describe_rate(tokens: float, rate: float) -> str:
    """The same without the targets."""
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

    `fixed_tokens` (--mixed-step-tokens) comes first, then what the engine measured; without either
    it is a part of `budget`, the most tokens of any step, and never more than that.
    """
    if fixed_tokens:
        return PrefillBudget(min(fixed_tokens, budget))
    tokens = min(max(budget // BUDGET_DIVISOR, MIN_BUDGET), budget)
    small = None if cost is None else cost.limited_to(MAX_UNNOTICED_TOKENS)
    return PrefillBudget(tokens, cost, small, targets)


def _unnoticed_prompt_tokens(cost: StepCost, rows: int, context: int, prior_tokens: int) -> int:
    """Tokens of prompts beside `rows` decodes that streams hardly notice; `prior_tokens` of the
    first prompt were computed before."""
    limit_here = cost.tokens_within(SLOWDOWN_PERCENT, rows, context, prior_tokens)
    # However deep the prompt: fewer tokens at a time would only make it disturb for longer.
    short = min(cost.tokens_within(SHORT_SLOWDOWN_PERCENT, SHORT_ROWS, 0, 0), SHORT_TOKENS)
    max_tokens = max(limit_here, short, rows + MIN_PROMPT_TOKENS)
    if not short and not cost.tokens_within(SLOWDOWN_PERCENT, rows, 0, 0):
        # Even the fewest take longer, as where kernels are launched one by one: then as many as
        # take hardly longer than those.
        max_tokens = max(
            max_tokens, cost.tokens_as_cheap_as(rows + MIN_PROMPT_TOKENS, SLOWDOWN_PERCENT)
        )
    return cost.best_size(max_tokens, rows, MIN_PROMPT_ROWS, TOKEN_WORTH_PERCENT) - rows


def _best_rate(sizes: Sequence[tuple[int, int]], total: int, decode_worth: int) -> int:
    """The number of prompt tokens, of those in `sizes` (tokens of prompts, time), whose tokens cost
    least each; `total` tokens of prompts wait."""
    enough = [size for size in sizes if size[0] >= min(MIN_PROMPT_TOKENS, total)]
    if not enough:
        return MIN_PROMPT_TOKENS
    return min(enough, key=lambda size: (size[1] - decode_worth) / min(size[0], total))[0]


def max_graph_tokens(fixed_tokens: int, budget: int) -> int:
    """Most tokens of a step that decodes, where its device is measured: what graphs are captured
    for. `fixed_tokens`: --mixed-step-tokens; `budget`: the most tokens of any step."""
    return min(fixed_tokens or budget, budget)

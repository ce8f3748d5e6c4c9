"""What steps take on a device, as its engine measured it at its start.

Whole numbers of picoseconds, so that a scheduler counts in a replay what it counted before. Knows
neither who measured nor what is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

PER_SECOND = 10**12  # picoseconds
# Tokens of the steps with prompts that engines measure, and capture. Matrix kernels compute whole
# tiles of 64 or 128 rows. Kernels of steps beyond 2,048 run longer than it takes to launch them;
# but in a graph, both kinds of attention run at once.
TOKENS = (
    64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
    12_288, 16_384,
)  # fmt: skip


def steps_up_to(most: int) -> tuple[int, ...]:
    """Those of TOKENS up to `most`, and `most` itself if it is not larger than all."""
    sizes = {tokens for tokens in TOKENS if tokens <= most}
    return tuple(sorted(sizes | {most} if most < TOKENS[-1] else sizes))


class Prompt(NamedTuple):
    """A prompt that waits, or a part of one: `tokens` of it to compute, `before` them as many as
    were computed, and its `age` in seconds."""

    tokens: int
    before: int = 0
    age: float = 0.0


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """Picoseconds. Steps and prompts are at their beginning: with hardly any context.

    decodes: (rows, time) of steps of decodes alone. mixed: (tokens, time, more) of steps of so many
    tokens, up to the most of any step, of which a few are decodes and the rest is of a prompt;
    `more` for each token of that prompt that was computed before. Both ascend in their first
    number, and neither is empty. kv_token: for each token of context that a decode reads.
    """

    decodes: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int, int], ...]
    kv_token: int = 0

    def __str__(self) -> str:
        """In milliseconds, for a person."""
        decodes = ", ".join(f"{rows} {_ms(time)}" for rows, time in self.decodes)
        mixed = ", ".join(
            f"{tokens} {_ms(time)} + {_ms(1000 * more)} per 1,000 tokens before"
            for tokens, time, more in self.mixed
        )
        context = _ms(1000 * self.kv_token)
        return f"decodes {decodes}, {context} per 1,000 tokens of context; with prompts {mixed}"

    def up_to(self, tokens: int) -> StepCost:
        """Of these, the sizes of at most `tokens` tokens, or the smallest if all have more."""
        few = tuple(size for size in self.mixed if size[0] <= tokens)
        return msgspec.structs.replace(self, mixed=few or self.mixed[:1])

    def alone(self, rows: int) -> int:
        """Of that many decodes: as measured with the most rows that are not more, if any are."""
        time = self.decodes[0][1]
        for measured, its in self.decodes:
            if measured > rows:
                break
            time = its
        return time

    def tokens_within(self, percent: int, rows: int, context: int, depth: int) -> int:
        """The most tokens of a step that takes at most `percent` of what its decodes take alone;
        0 if even the fewest take more. Of `rows` decodes with `context` tokens before all of them,
        and of a prompt with `depth` tokens before.
        """
        reading = context * self.kv_token
        most = (self.alone(rows) + reading) * percent // 100 - reading
        fitting = (tokens for tokens, time, more in self.mixed if time + more * depth <= most)
        return max(fitting, default=0)

    def like(self, tokens: int, percent: int) -> int:
        """The most tokens of a step that takes at most `percent` of what one of `tokens` takes; 0
        if all that were measured have fewer."""
        least = next((time for size, time, _ in self.mixed if size >= tokens), 0) * percent // 100
        return max((size for size, time, _ in self.mixed if time <= least), default=0)

    def steps(
        self, rows: int, context: int, prompts: Sequence[Prompt]
    ) -> Iterator[tuple[int, int]]:
        """(tokens, time) of each size that holds `rows` decodes, with `context` tokens before all
        of them, and what else has room of `prompts`, in their order; up to the size that holds all.
        """
        reading = context * self.kv_token
        waiting, all_of_them = iter(prompts), sum([prompt.tokens for prompt in prompts])
        held = pairs = left = before = 0
        for tokens, time, more in self.mixed:
            room = min(tokens - rows, all_of_them)
            while held < room:
                if not left:
                    left, before, _ = next(waiting)
                part = min(left, room - held)
                pairs += part * before + part * part // 2
                held, left, before = held + part, left - part, before + part
            if held:
                # As measured, all tokens are of one prompt that begins.
                apart = pairs - tokens * tokens // 2
                yield tokens, time + reading + more * apart // tokens
            if held == all_of_them:
                return

    def worthwhile(self, most: int, rows: int, room: int, percent: int) -> int:
        """The size of at most `most` tokens in which prompts beside `rows` decodes, at least `room`
        tokens, gain most; `most` if they gain in none.

        A token of theirs is worth `percent` of what one takes in the size that is cheapest by the
        token; it costs what the step takes longer than its decodes alone.
        """
        alone = self.alone(rows)
        worth = min(time // tokens for tokens, time, _ in self.mixed) * percent // 100
        best, found = 0, most
        for tokens, time, _ in self.mixed:
            gain = worth * (tokens - rows) - (time - alone)
            if rows + room <= tokens <= most and gain > best:
                best, found = gain, tokens
        return found


def _ms(picoseconds: int) -> str:
    return f"{picoseconds / 10**9:.3f}"

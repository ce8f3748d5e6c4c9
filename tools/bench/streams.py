"""Streams of tokens that begin together: what is asked for, when tokens came, the numbers of it.

Pure: lengths and times in, medians and ratios out. Knows no engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

PROMPTS = (128, 1000)  # tokens of the prompts whose rate is measured
PROMPT_TIMES = 2  # as often a round: a short one takes less than a time slice of a neighbour
OUTPUT_ALONE, OUTPUT_TOGETHER = 128, 64


class Case(msgspec.Struct, frozen=True):
    """Streams of `output` tokens each, one for each prompt. `flash`: with flash attention, which
    llama.cpp is faster with where it reads a prompt, and slower where it decodes."""

    name: str
    prompts: list[list[int]]
    output: int
    flash: bool


class Seen(msgspec.Struct, frozen=True):
    """For each stream: (seconds since all began, the tokens that came then), in order."""

    streams: list[list[tuple[float, list[int]]]]

    def outputs(self) -> list[list[int]]:
        return [[token for _, ids in stream for token in ids] for stream in self.streams]


@dataclass
class Pieces:
    """Cuts a text's tokens into prompts. No two are alike, so no cache of prefixes can help."""

    tokens: Sequence[int]
    used: int = 0

    def case(self, name: str, streams: int, prompt: int, output: int) -> Case:
        prompts = [self._take(prompt) for _ in range(streams)]
        return Case(name, prompts, output, flash=output == 1)

    def _take(self, count: int) -> list[int]:
        self.used += count
        if self.used > len(self.tokens):
            raise ValueError(f"the text has {len(self.tokens)} tokens, fewer than {self.used}")
        return list(self.tokens[self.used - count : self.used])


def cases(pieces: Pieces, streams: int) -> list[Case]:
    """What is measured once a round."""
    alone = pieces.case("1 stream", 1, 128, OUTPUT_ALONE)
    together = pieces.case(f"{streams} streams", streams, 128, OUTPUT_TOGETHER)
    prompts = [
        pieces.case(f"prompt of {length}", 1, length, 1)
        for length in PROMPTS
        for _ in range(PROMPT_TIMES)
    ]
    return [alone, together, *prompts]


def warm_up(pieces: Pieces, streams: int) -> list[Case]:
    """The same shapes with short outputs."""
    lengths = [pieces.case("", 1, length, 1) for length in PROMPTS]
    return [pieces.case("", 1, 128, 8), pieces.case("", streams, 32, 8), *lengths]


def numbers(case: Case, seen: Seen) -> dict[str, float]:
    """{name of the number: value} of one case; RuntimeError if tokens are missing.

    Decoding counts while all streams decode: from the last one's first token to the first end.
    """
    counts = [len(ids) for ids in seen.outputs()]
    if counts != [case.output] * len(case.prompts):
        raise RuntimeError(f"{case.name}: {counts} tokens instead of {case.output} each")
    firsts = [stream[0][0] for stream in seen.streams]
    if case.output == 1:
        rate = sum(map(len, case.prompts)) / max(firsts)
        return {f"{case.name}: prompt tokens/s": rate}
    begin, end = max(firsts), min(stream[-1][0] for stream in seen.streams)
    decoded = sum(
        len(ids) for stream in seen.streams for at, ids in stream if begin < at <= end
    )  # fmt: skip
    whole = max(stream[-1][0] for stream in seen.streams)
    return {
        f"{case.name}: decode tokens/s": decoded / (end - begin),
        f"{case.name}: all tokens/s": sum(counts) / whole,
        f"{case.name}: time to first token, ms": 1e3 * statistics.median(firsts),
    }


def of_round(cases: Sequence[Case], seen: Sequence[Seen]) -> dict[str, float]:
    """The numbers of one round; the median of those that it has several times."""
    found: dict[str, list[float]] = {}
    for case, one in zip(cases, seen, strict=True):
        for name, value in numbers(case, one).items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and ends."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def compared(rounds: Mapping[str, Sequence[Mapping[str, float]]], ours: str) -> dict[str, Any]:
    """{number: {side: spread, "ratio to SIDE": spread}}; ratios are ours by theirs in one round,
    of rates and of times alike."""
    result: dict[str, Any] = {}
    for name in rounds[ours][0]:
        values = {side: [one[name] for one in of] for side, of in rounds.items()}
        result[name] = {side: spread(of) for side, of in values.items()}
        for side in rounds.keys() - {ours}:
            pairs = zip(values[ours], values[side], strict=True)
            result[name][f"ratio to {side}"] = spread([a / b for a, b in pairs])
    return result


def equal_beginning(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """The share of all tokens before two outputs part, over pairs of outputs."""
    same = total = 0
    for a, b in zip(one, other, strict=True):
        equal = [x == y for x, y in zip(a, b, strict=True)]
        same += equal.index(False) if False in equal else len(equal)
        total += len(equal)
    return same / total

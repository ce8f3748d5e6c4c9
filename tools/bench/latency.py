"""When the tokens of streamed requests came, and what that says: percentiles and goodput.

Knows times in seconds; nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Timeline:
    """One request: when it was due, when each piece of its stream came, how many tokens it got, and
    how many its prompt had.

    Times are seconds of one monotonic clock. `due` is the arrival that was planned: a client that
    sends late, or waits in a queue, does not make the server look faster.
    """

    due: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt: int = 0
    error: str = ""

    @property
    def complete(self) -> bool:
        return not self.error and bool(self.pieces)

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.pieces[0] - self.due

    @property
    def whole(self) -> float:
        """Seconds to the last token."""
        return self.pieces[-1] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces of the stream."""
        return [late - early for early, late in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Target:
    """A request is good if its first token and its mean time between tokens are fast enough."""

    first: float
    between: float

    def met(self, line: Timeline) -> bool:
        return line.complete and line.first <= self.first and line.per_token <= self.between


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds; empty without values."""
    if not len(seconds):
        return {}
    values = np.percentile(np.asarray(seconds) * 1e3, (50, 90, 99))
    return dict(zip(("p50", "p90", "p99"), values.tolist(), strict=True))


def summary(lines: Sequence[Timeline], target: Target) -> dict[str, Any]:
    """Metrics over all requests that were sent; the run lasts from the first arrival to the end."""
    complete = [line for line in lines if line.complete]
    ends = [line.pieces[-1] for line in complete]
    seconds = max(ends) - min(line.due for line in lines) if ends else 0.0
    gaps = [gap for line in complete for gap in line.gaps]
    good = sum(target.met(line) for line in lines)
    return {
        "requests": len(lines),
        "failed": len(lines) - len(complete),
        "seconds": seconds,
        "tokens_per_s": sum(line.tokens for line in complete) / seconds if seconds else 0.0,
        "prompt_tokens_per_s": sum(line.prompt for line in complete) / seconds if seconds else 0.0,
        "goodput_per_s": good / seconds if seconds else 0.0,
        "good_share": good / len(lines),
        "ttft_ms": percentiles([line.first for line in complete]),
        "itl_ms": percentiles(gaps),
        "longest_gap_ms": max(gaps, default=0.0) * 1e3,
        "e2e_ms": percentiles([line.whole for line in complete]),
    }

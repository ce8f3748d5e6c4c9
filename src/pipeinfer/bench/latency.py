"""When the tokens of streamed requests came, and what that says: percentiles and goodput.

Knows times in seconds; nothing of HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import numpy as np

FAILED = "other"  # the kind of a failure that nobody has named


class RequestTiming(msgspec.Struct, array_like=True):
    """One request: when it was due and sent, when each piece of its stream came and when it ended,
    how many tokens it got, and how many its prompt had, and how many of them a cache.

    `asked` is the most tokens it may get; `counted`: the server said how many there were.
    Times are seconds of one monotonic clock. `due` is the arrival that was planned: a client that
    sends late, or waits in a queue, does not make the server look faster. `failure` is the kind of
    what went wrong, `error` says what it was.
    """

    due: float
    chunk_times: list[float] = []
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    failure: str = ""
    sent: float = 0.0
    end: float = 0.0
    cached_tokens: int = 0
    max_tokens: int = 0
    has_usage: bool = False

    @property
    def success(self) -> bool:
        return not self.error and bool(self.chunk_times)

    @property
    def failure_kind(self) -> str:
        """Of its failure; "" if it did not fail."""
        return "" if self.success else self.failure or FAILED

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.chunk_times[0] - self.due

    @property
    def end_time(self) -> float:
        """When the stream had ended; a server may say so in a piece of its own."""
        return max(self.end, self.chunk_times[-1])

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.end_time - self.due

    @property
    def send_delay(self) -> float:
        """Seconds from when it was due until the client sent it."""
        return max(self.sent - self.due, 0.0)

    @property
    def itls(self) -> list[float]:
        """Seconds between the pieces of the stream."""
        return [
            late - early
            for early, late in zip(self.chunk_times, self.chunk_times[1:], strict=False)
        ]

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.end_time - self.chunk_times[0]) / max(self.output_tokens - 1, 1)


@dataclass(frozen=True)
class GoodputTarget:
    """A request is good if its first token and its mean time between tokens are fast enough."""

    ttft: float
    tpot: float

    def met_by(self, line: RequestTiming) -> bool:
        return line.success and line.ttft <= self.ttft and line.tpot <= self.tpot


class BenchmarkMetrics(TypedDict):
    """The metrics of a run; times are milliseconds by percentile, empty where there is none."""

    requests: int
    failed: int
    failures: dict[str, int]
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    goodput_per_s: float
    good_share: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    longest_gap_ms: float
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds; empty without values."""
    if not len(seconds):
        return {}
    values = np.percentile(np.asarray(seconds) * 1e3, (50, 90, 99))
    return dict(zip(("p50", "p90", "p99"), values.tolist(), strict=True))


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """The same with the mean and the longest."""
    if not len(seconds):
        return {}
    values = np.asarray(seconds) * 1e3
    ends = {"mean": float(values.mean()), "max": float(values.max())}
    return percentiles(seconds) | ends


def benchmark_metrics(lines: Sequence[RequestTiming], target: GoodputTarget) -> BenchmarkMetrics:
    """Metrics over all requests that were sent; the run lasts from the first arrival to the end.

    What failed counts as requests and failures, and nowhere else. The order does not matter.
    """
    complete = [line for line in lines if line.success]
    seconds = (
        max(line.end_time for line in complete) - min(line.due for line in lines)
        if complete
        else 0.0
    )
    seconds = max(seconds, 0.0)
    prompt, output = (
        sum(line.prompt_tokens for line in complete),
        sum(line.output_tokens for line in complete),
    )
    gaps = [gap for line in complete for gap in line.itls]
    good = sum(target.met_by(line) for line in lines)

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    return {
        "requests": len(lines),
        "failed": len(lines) - len(complete),
        "failures": dict(
            sorted(Counter(line.failure_kind for line in lines if line.failure_kind).items())
        ),
        "seconds": seconds,
        "requests_per_s": rate(len(complete)),
        "tokens_per_s": rate(output),
        "prompt_tokens_per_s": rate(prompt),
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(line.cached_tokens for line in complete),
        "goodput_per_s": rate(good),
        "good_share": good / len(lines) if lines else 0.0,
        "ttft_ms": distribution([line.ttft for line in complete]),
        "itl_ms": distribution(gaps),
        "longest_gap_ms": max(gaps, default=0.0) * 1e3,
        "tpot_ms": distribution([line.tpot for line in complete if line.output_tokens > 1]),
        "e2e_ms": distribution([line.e2e for line in complete]),
    }

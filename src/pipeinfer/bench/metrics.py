"""Timings of streamed requests, their statistics, and how far the client itself distorted them.

Times in memory are seconds of one monotonic clock; those of results are milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import msgspec
import numpy as np

OTHER_FAILURE = "other"  # the kind of a failure that has no name of its own


class RequestTiming(msgspec.Struct, array_like=True):
    """What the client saw of one request.

    due: the planned arrival. Latencies count from here, so that a client that sends late does not
        make the server look faster.
    chunk_times: when each chunk with a token arrived.
    output_tokens: of the answer; as many as chunks where the server does not count them.
    prompt_tokens: of the prompt.
    error: text of the failure; "": none.
    failure: its kind, as in the "failures" of a result.
    sent: when the request was sent; 0.0 before.
    end: when the last chunk arrived, with or without a token.
    cached_tokens: prompt tokens that came from the server's prefix cache.
    max_tokens: of the request.
    has_usage: the server reported token counts.
    """

    due: float
    chunk_times: list[float] = []
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    failure: str = ""
    sent: float = 0.0
    last_chunk_time: float = 0.0
    cached_tokens: int = 0
    max_tokens: int = 0
    has_usage: bool = False

    @property
    def success(self) -> bool:
        return not self.error and bool(self.chunk_times)

    @property
    def failure_kind(self) -> str:
        """The kind of its failure; "" if it succeeded."""
        return "" if self.success else self.failure or OTHER_FAILURE

    @property
    def ttft(self) -> float:
        """Seconds from `due` to the first token."""
        return self.chunk_times[0] - self.due

    @property
    def end_time(self) -> float:
        """When the stream ended; a server may say so in a chunk without a token."""
        return max(self.last_chunk_time, self.chunk_times[-1])

    @property
    def e2e(self) -> float:
        """Seconds from `due` to the end."""
        return self.end_time - self.due

    @property
    def send_delay(self) -> float:
        """Seconds from `due` until the client sent the request."""
        return max(self.sent - self.due, 0.0)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: seconds between chunks."""
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
    """A request counts for goodput if it succeeded within both limits.

    ttft: seconds to the first token.
    tpot: mean seconds of a token after the first.
    """

    ttft: float
    tpot: float

    def met_by(self, timing: RequestTiming) -> bool:
        return timing.success and timing.ttft <= self.ttft and timing.tpot <= self.tpot


class BenchmarkMetrics(TypedDict):
    """The metrics of a load; times are milliseconds by percentile, empty without values."""

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
    """p50, p90 and p99 in milliseconds of values in seconds; empty without values."""
    if not len(seconds):
        return {}
    values = np.percentile(np.asarray(seconds) * 1e3, (50, 90, 99))
    return dict(zip(("p50", "p90", "p99"), values.tolist(), strict=True))


def distribution(seconds: Sequence[float]) -> dict[str, float]:
    """The percentiles with mean and maximum, in milliseconds; empty without values."""
    if not len(seconds):
        return {}
    values = np.asarray(seconds) * 1e3
    ends = {"mean": float(values.mean()), "max": float(values.max())}
    return percentiles(seconds) | ends


def benchmark_metrics(timings: Sequence[RequestTiming], target: GoodputTarget) -> BenchmarkMetrics:
    """Metrics of all requests that were sent, from the first arrival to the last end.

    Failed requests count in `requests`, `failed` and `failures` alone. The order does not matter.
    """
    succeeded = [timing for timing in timings if timing.success]
    start = min((timing.due for timing in timings), default=0.0)
    seconds = max([timing.end_time - start for timing in succeeded] + [0.0])
    prompt = sum(timing.prompt_tokens for timing in succeeded)
    output = sum(timing.output_tokens for timing in succeeded)
    gaps = [gap for timing in succeeded for gap in timing.itls]
    failures = Counter(timing.failure_kind for timing in timings if timing.failure_kind)
    good = sum(target.met_by(timing) for timing in timings)

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    return {
        "requests": len(timings),
        "failed": len(timings) - len(succeeded),
        "failures": dict(sorted(failures.items())),
        "seconds": seconds,
        "requests_per_s": rate(len(succeeded)),
        "tokens_per_s": rate(output),
        "prompt_tokens_per_s": rate(prompt),
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(timing.cached_tokens for timing in succeeded),
        "goodput_per_s": rate(good),
        "good_share": good / len(timings) if timings else 0.0,
        "ttft_ms": distribution([timing.ttft for timing in succeeded]),
        "itl_ms": distribution(gaps),
        "longest_gap_ms": max(gaps, default=0.0) * 1e3,
        "tpot_ms": distribution([timing.tpot for timing in succeeded if timing.output_tokens > 1]),
        "e2e_ms": distribution([timing.e2e for timing in succeeded]),
    }


LAG_SAMPLE_SECONDS = 0.02  # between two samples of the event loop's lag
ALLOWED_LAG_SHARE = 0.1  # of the server's median times, that the client's own delay may be
ALLOWED_LAG_SECONDS = 0.005  # of delay that does not matter: timers are no finer than 1 ms
BUSY_CPU_SHARE = 0.9  # of a core: beyond, a worker process has no time left


class ClientLoad(msgspec.Struct, array_like=True):
    """How busy one worker process was.

    loop_lags: seconds that its event loop was late, at each sample.
    cpu_share: CPU seconds per second.
    """

    loop_lags: list[float]
    cpu_share: float


class LoopLagMonitor:
    """Samples the lag of the event loop that it runs in, until it is cancelled."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._began, self._used = time.perf_counter(), time.process_time()

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + LAG_SAMPLE_SECONDS
            await asyncio.sleep(LAG_SAMPLE_SECONDS)
            self._lags.append(max(time.perf_counter() - due, 0.0))

    def client_load(self) -> ClientLoad:
        """What was sampled so far."""
        passed = time.perf_counter() - self._began
        return ClientLoad(
            self._lags, (time.process_time() - self._used) / passed if passed else 0.0
        )


class ClientStats(msgspec.Struct, frozen=True):
    """How much the client itself may have distorted the times.

    processes: worker processes.
    lag_ms: lag of their event loops, milliseconds by percentile.
    late_ms: of requests, from due to sent, milliseconds by percentile.
    busy: CPU share of the busiest worker.
    """

    processes: int
    lag_ms: dict[str, float]
    late_ms: dict[str, float]
    busy: float


def client_stats(loads: Sequence[ClientLoad], timings: Sequence[RequestTiming]) -> ClientStats:
    """Statistics over all worker processes of a load."""
    return ClientStats(
        processes=len(loads),
        lag_ms=percentiles([lag for load in loads for lag in load.loop_lags]),
        late_ms=percentiles([timing.send_delay for timing in timings if timing.sent]),
        busy=max((load.cpu_share for load in loads), default=0.0),
    )


def client_warnings(client: ClientStats, measured: BenchmarkMetrics) -> list[str]:
    """Sentences about delays of the client that are in the measured times."""
    warnings: list[str] = []
    times = [measured[name].get("p50", 0.0) for name in ("ttft_ms", "itl_ms")]
    smallest = min([one for one in times if one > 0], default=0.0)
    allowed = max(ALLOWED_LAG_SHARE * smallest, ALLOWED_LAG_SECONDS * 1e3)
    lag, late = client.lag_ms.get("p99", 0.0), client.late_ms.get("p99", 0.0)
    if lag > allowed:
        warnings.append(
            f"the client was late itself: its event loop by {lag:.1f} ms (p99), which is in all "
            "these times"
        )
    if late > allowed:
        warnings.append(f"requests were sent up to {late:.1f} ms (p99) after they were due")
    if client.busy > BUSY_CPU_SHARE:
        warnings.append(f"a process of the client computed {client.busy:.0%} of the time")
    if warnings:
        warnings[-1] += "; more --processes help, or another machine for the client"
    return warnings

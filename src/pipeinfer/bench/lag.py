"""How late a client itself was, so that nobody takes its delay for the server's.

Knows its own event loop and the time that its process computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from pipeinfer.bench.latency import BenchmarkMetrics, RequestTiming, percentiles

EVERY = 0.02  # seconds between two looks at the loop
SHARE = 0.1  # of the server's own times, that the client's delay may be
LEAST = 0.005  # seconds that do not matter: timers are no finer than one millisecond
BUSY = 0.9  # share of a core from which on a process has no time left


class ClientLoad(msgspec.Struct, array_like=True):
    """Of one process: how late its loop was each time, in seconds, and which share of the time it
    computed."""

    loop_lags: list[float]
    cpu_share: float


class LoopLagMonitor:
    """Looks at the loop in which it runs, until it is cancelled."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._began, self._used = time.perf_counter(), time.process_time()

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + EVERY
            await asyncio.sleep(EVERY)
            self._lags.append(max(time.perf_counter() - due, 0.0))

    def client_load(self) -> ClientLoad:
        """So far."""
        passed = time.perf_counter() - self._began
        return ClientLoad(
            self._lags, (time.process_time() - self._used) / passed if passed else 0.0
        )


class ClientStats(msgspec.Struct, frozen=True):
    """How the client did: milliseconds by percentile, and the busiest process's share of a core.

    lag_ms: of its loops, whenever looked at. late_ms: of requests, from due to sent.
    """

    processes: int
    lag_ms: dict[str, float]
    late_ms: dict[str, float]
    busy: float


def client_stats(owns: Sequence[ClientLoad], lines: Sequence[RequestTiming]) -> ClientStats:
    """Of all processes of a run."""
    return ClientStats(
        processes=len(owns),
        lag_ms=percentiles([lag for own in owns for lag in own.loop_lags]),
        late_ms=percentiles([line.send_delay for line in lines if line.sent]),
        busy=max((own.cpu_share for own in owns), default=0.0),
    )


def client_warnings(client: ClientStats, measured: BenchmarkMetrics) -> list[str]:
    """What makes the measured times worse than the server's are."""
    said: list[str] = []
    times = [measured[name].get("p50", 0.0) for name in ("ttft_ms", "itl_ms")]
    smallest = min([one for one in times if one > 0], default=0.0)
    allowed = max(SHARE * smallest, LEAST * 1e3)
    lag, late = client.lag_ms.get("p99", 0.0), client.late_ms.get("p99", 0.0)
    if lag > allowed:
        said.append(
            f"the client was late itself: its event loop by {lag:.1f} ms (p99), which is in all "
            "these times"
        )
    if late > allowed:
        said.append(f"requests were sent up to {late:.1f} ms (p99) after they were due")
    if client.busy > BUSY:
        said.append(f"a process of the client computed {client.busy:.0%} of the time")
    if said:
        said[-1] += "; more --processes help, or another machine for the client"
    return said

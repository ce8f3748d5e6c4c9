"""Statistics of timelines: right for any times, and the same however processes share requests."""

from __future__ import annotations

import asyncio
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.bench import client
from pipeinfer.bench.client import (
    ClientLoad,
    ClientStats,
    GoodputTarget,
    LoopLagMonitor,
    RequestTiming,
)
from pipeinfer.bench.runner import (
    WorkerProgress,
    WorkerResult,
    encode_message,
    join_results,
    total_progress,
)

TARGET = GoodputTarget(1.0, 0.1)
SECONDS = st.floats(0.0, 100.0, allow_nan=False)


@st.composite
def timelines(draw: st.DrawFn) -> RequestTiming:
    due = draw(SECONDS)
    sent = due + draw(st.floats(0.0, 1.0))
    at, pieces = sent, []
    for gap in draw(st.lists(st.floats(1e-6, 5.0), max_size=8)):
        at += gap
        pieces.append(at)
    failed = draw(st.booleans())
    kind = draw(st.sampled_from(("timeout", "status 500", ""))) if failed else ""
    return RequestTiming(
        due, pieces, draw(st.integers(len(pieces), 40)), draw(st.integers(0, 500)),
        error="it failed" if failed else "", failure=kind, sent=sent, last_chunk_time=at,
        cached_tokens=draw(st.integers(0, 9)),
    )  # fmt: skip


@given(st.lists(SECONDS, min_size=1))
def test_quantiles_are_numpys_in_milliseconds(seconds: list[float]) -> None:
    found = client.distribution(seconds)
    ordered = sorted(seconds)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[name] == pytest.approx(1e3 * np.quantile(seconds, share), abs=1e-6)
        place = share * (len(ordered) - 1)
        low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
        assert 1e3 * low - 1e-6 <= found[name] <= 1e3 * high + 1e-6
    assert found["max"] == pytest.approx(1e3 * ordered[-1])
    assert found["mean"] == pytest.approx(1e3 * sum(seconds) / len(seconds), abs=1e-6)


@given(st.lists(timelines(), min_size=1, max_size=12), st.integers(1, 4), st.randoms())
def test_what_several_processes_saw_is_what_one_would_have_seen(lines, many, chance) -> None:
    """Through the bytes on their pipes."""
    shares: list[list[RequestTiming]] = [[] for _ in range(many)]
    for line in lines:
        chance.choice(shares).append(line)
    reports = [
        msgspec.msgpack.decode(
            encode_message(
                WorkerProgress(
                    len(share), 1, 2, 3, WorkerResult(share, ClientLoad([0.1] * len(share), 0.5))
                )
            ),
            type=WorkerProgress,
        )
        for share in shares
    ]
    merged = join_results([report.result for report in reports if report.result is not None])
    flat = lambda found: dict(_numbers(found))  # noqa: E731
    alone, together = (
        client.benchmark_metrics(lines, TARGET),
        client.benchmark_metrics(merged.timings, TARGET),
    )
    assert flat(together) == pytest.approx(flat(alone))
    assert len([one for own in merged.client_loads for one in own.loop_lags]) == len(lines)
    assert total_progress(reports) == WorkerProgress(len(lines), many, 2 * many, 3 * many)


def _numbers(found, name=""):
    for key, value in found.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{name}{key}.")
        else:
            yield name + key, value


@given(st.lists(timelines(), max_size=12))
def test_a_summary_counts_each_request_once(lines: list[RequestTiming]) -> None:
    found = client.benchmark_metrics(lines, TARGET)
    whole = [line for line in lines if not line.error and line.chunk_times]
    assert found["requests"] == len(lines)
    assert found["failed"] == len(lines) - len(whole) == sum(found["failures"].values())
    assert found["output_tokens"] == sum(line.output_tokens for line in whole)
    assert found["requests_per_s"] * found["seconds"] == pytest.approx(
        len(whole) if found["seconds"] else 0
    )
    assert found["good_share"] <= len(whole) / max(len(lines), 1)
    gaps = [
        b - a
        for line in whole
        for a, b in zip(line.chunk_times, line.chunk_times[1:], strict=False)
    ]
    assert found["longest_gap_ms"] == pytest.approx(1e3 * max(gaps, default=0.0))
    if gaps:
        assert found["itl_ms"]["p50"] == pytest.approx(1e3 * np.median(gaps))


def test_times_count_from_when_a_request_was_due() -> None:
    line = RequestTiming(10.0, [11.5, 12.0], output_tokens=2, sent=11.0, last_chunk_time=12.5)
    assert (line.ttft, line.e2e, line.send_delay, line.tpot) == (1.5, 2.5, 1.0, 1.0)


def test_a_loop_that_is_held_up_is_seen_late() -> None:
    async def held_up() -> ClientLoad:
        watch = LoopLagMonitor()
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(0.05)
        before = time.process_time()
        while time.process_time() - before < 0.2:  # as a client that has too much to do
            hash(before)
        await asyncio.sleep(0.05)
        watching.cancel()
        return watch.client_load()

    own = asyncio.run(held_up())
    assert max(own.loop_lags) > 0.15
    assert own.cpu_share * 10 > 0.2


def test_a_client_that_was_late_says_so_and_one_that_was_not_is_silent() -> None:
    quick = client.benchmark_metrics(
        [RequestTiming(0.0, [0.02, 0.03, 0.04], output_tokens=3)], TARGET
    )
    calm = ClientStats(1, {"p99": 1.0}, {"p99": 1.0}, 0.3)
    assert client.client_warnings(calm, quick) == []
    (late,) = client.client_warnings(ClientStats(1, {"p99": 9.0}, {"p99": 1.0}, 0.3), quick)
    assert "event loop by 9.0 ms" in late and "--processes" in late
    (late,) = client.client_warnings(ClientStats(1, {"p99": 1.0}, {"p99": 7.0}, 0.3), quick)
    assert "sent up to 7.0 ms" in late
    (busy,) = client.client_warnings(ClientStats(1, {"p99": 1.0}, {"p99": 1.0}, 0.97), quick)
    assert "97%" in busy
    slow = client.benchmark_metrics([RequestTiming(0.0, [2.0, 3.0, 4.0], output_tokens=3)], TARGET)
    assert client.client_warnings(ClientStats(1, {"p99": 9.0}, {"p99": 9.0}, 0.3), slow) == []


def test_only_requests_that_were_sent_can_be_late() -> None:
    lines = [RequestTiming(1.0, sent=1.004), RequestTiming(2.0)]
    found = client.client_stats([ClientLoad([0.001], 0.2), ClientLoad([0.003], 0.6)], lines)
    assert found.late_ms["p50"] == pytest.approx(4.0)
    assert (found.processes, found.busy) == (2, 0.6)
    assert found.lag_ms["p50"] == pytest.approx(2.0)

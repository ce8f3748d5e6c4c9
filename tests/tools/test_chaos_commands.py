"""Hostile clients and overload, in short; and that they see what is broken."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter

import pytest

from chaos import streams
from chaos.cases import CASES
from chaos.overload import Samples, judged
from chaos.streams import StreamEvents

ONLY = "s beyond the bound"  # cases that are soon built, sent and refused


def test_a_hostile_client_is_answered_as_its_case_says_and_nobody_is_restarted(
    tool_run, monkeypatch
):
    """Gaps are left out: here other tests run beside it."""
    monkeypatch.setattr(streams, "QUIET", 0.3)
    monkeypatch.setattr(streams, "MAX_QUIET_GAP", 10.0)
    words = ("--seconds", "0.2", "--calm", "2", "--streams", "2", "--only", ONLY)
    code, metrics, *_ = tool_run("chaos", "hostile", *words)
    names = [case.name for case in CASES if ONLY in case.name]
    assert [case["case"] for case in metrics["cases"]] == names and len(names) > 1
    for case in metrics["cases"]:
        assert case["sent"] == sum(case["statuses"].values()) > 0
        assert case["pieces"] > 0 and case["restarts"] == 0
        assert not [text for text in case["broken"] if "answer" in text or "failed" in text]
    assert metrics["calm"]["pieces"] > 4 and metrics["calm"]["failed"] == []
    assert code == bool(metrics["broken"])


def test_under_overload_every_request_is_accepted_or_refused(tool_run):
    words = ("--rate", "80", "--seconds", "1", "--tokens", "40")
    limits = ("--max-running", "2", "--max-queue", "2")
    code, metrics, *_ = tool_run("chaos", "overload", *words, *limits)
    assert metrics["offered"] == 80 == sum(metrics["statuses"].values())
    assert set(metrics["statuses"]) == {"200", "429"}
    assert metrics["health_samples"] > 5 and metrics["gateway_mib"] > 10
    assert code == bool(metrics["broken"])


def test_the_longest_gap_is_found_in_whichever_stream_it_is():
    seen = StreamEvents(2)
    for at in range(10):
        seen.add(0, "piece", at / 10)
        if at not in (4, 5, 6):
            seen.add(1, "piece", at / 10 + 0.01)
    seen.add(0, "end", 0.91)
    seen.add(0, "ask", 0.92)
    seen.add(0, "piece", 1.22)
    calm = seen.between(0.0, 2.0)
    assert (calm.gap, calm.first) == (pytest.approx(0.4), pytest.approx(0.3))
    assert seen.between(0.0, 0.2).gap == pytest.approx(0.1), "before it"
    assert seen.between(0.5, 0.6).gap == pytest.approx(0.4), "within it"
    assert not seen.quiet(0.5, 0.6), "a stream did not move"
    assert not seen.quiet(0.0, 1.3) or calm.gap < 0.4
    seen.add(1, "fail: Closed()", 1.3)
    assert seen.between(1.2, 1.4).failed == ("fail: Closed()",)


GOOD = [(0.0, 0.0, 0.01, 429, True)] * 99 + [(0.0, 0.0, 5.0, 200, True)]
WELL = Samples(health=[0.001] * 10, statuses=Counter({200: 10}), rss=100 << 20)


def broken(rows=GOOD, samples=WELL) -> list[str]:
    return judged(rows, samples, Namespace(seconds=1.0))["broken"]


def test_each_promise_of_overload_is_seen_when_it_is_broken():
    assert broken() == []
    assert "429 takes" in broken([(0.0, 0.0, 0.5, 429, True)] * 5 + GOOD)[0]
    assert "not whole" in broken([*GOOD, (0.0, 0.0, 5.0, 200, False)])[0]
    assert "statuses" in broken([*GOOD, (0.0, 0.0, 0.1, 500, True)])[0]
    assert "MiB" in broken(samples=Samples([0.001], Counter({200: 1}), 0, 2 << 30))[0]
    assert "/health" in broken(samples=Samples([0.001], Counter({200: 1}), 1, 1 << 20))[0]

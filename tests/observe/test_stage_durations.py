"""Which part of a request's passage through a stage is that stage's latency."""

from __future__ import annotations

import pytest

from pipeinfer.control import RequestSpan, TimedEvent
from pipeinfer.observe.spans import MAX_DURATIONS, MINUTE, StageDurations

NOW = 1_000.0
BEGAN = NOW - 30
MOMENTS = (
    TimedEvent(BEGAN + 2, "admitted"),
    TimedEvent(BEGAN + 4, "first_text", {"seconds": 0.25}),
)


def passage(
    stage: str, ended: float = NOW, moments: tuple[TimedEvent, ...] = MOMENTS
) -> RequestSpan:
    return RequestSpan(stage, "r", BEGAN, ended, "", "", moments)


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        ("tokenizer-0", 30.0),
        ("scheduler-1", 2.0),
        ("detokenizer-0", 0.25),
        ("engine-0-0", None),
        ("gateway-0", None),
    ],
)
def test_each_kind_of_stage_has_its_own_part(stage, seconds):
    durations = StageDurations(lambda: NOW)
    durations.on_span(passage(stage))
    assert durations.median(stage) == seconds


@pytest.mark.parametrize("stage", ["scheduler-0", "detokenizer-0"])
def test_a_passage_without_that_part_says_nothing(stage):
    durations = StageDurations(lambda: NOW)
    durations.on_span(passage(stage, moments=()))
    durations.on_span(passage(stage, ended=0.0))
    assert durations.median(stage) is None


def test_only_the_latest_of_the_last_minute_count():
    now = NOW
    durations = StageDurations(lambda: now)
    for ended in (NOW + 100, NOW):
        for _ in range(MAX_DURATIONS):
            durations.on_span(passage("tokenizer-0", ended=ended))
    assert durations.median("tokenizer-0") == NOW - BEGAN
    now = NOW + MINUTE + 1
    assert durations.median("tokenizer-0") is None
    durations.on_span(passage("tokenizer-0", ended=now))
    assert durations.median("tokenizer-0") == now - BEGAN
    durations.clear()
    assert durations.median("tokenizer-0") is None

"""An engine's latency is its last step's average, for a minute after it; rates are smoothed."""

from __future__ import annotations

from pipeinfer.gateway.core import ExpectedStage, Health
from pipeinfer.gateway.monitor import PipelineRates
from pipeinfer.messages import Heartbeat

STAGES = [ExpectedStage("gateway-0", "gateway"), ExpectedStage("engine-0-0", "engine")]


def test_an_engines_steps_are_remembered_for_a_minute():
    health = Health(STAGES)
    pictures = PipelineRates(health)

    def engine(now: float, steps: int, busy: float, incarnation: int = 1) -> float | None:
        stats = {"steps_total": float(steps), "busy_seconds": busy}
        health.on_heartbeat(
            Heartbeat("engine-0-0", "engine", 0, 0, 0, 1, incarnation, "ready", stats=stats), now
        )
        pictures.update()
        return shown(now)

    def shown(now: float) -> float | None:
        figures = pictures.snapshot("ok", now, now, lambda stage: None)
        [row] = [row for row in figures.stages if row.name == "engine"]
        return row.latency_ms

    assert engine(1, 0, 0.0) is None
    assert engine(2, 10, 0.5) == 50
    assert engine(3, 10, 0.5) == 50  # it rests
    assert shown(62) == 50
    assert shown(62.5) is None
    assert engine(63, 12, 0.75) == 125
    # A new process counts from nothing: what it did before it was heard was never seen.
    assert engine(64, 3, 0.25, incarnation=9) == 125
    assert engine(65, 4, 0.5, incarnation=9) == 250


def test_rates_are_those_of_five_seconds_and_the_same_at_all_places():
    health = Health(STAGES)
    pictures = PipelineRates(health)
    total = 0.0
    for quarter in range(41):  # ten seconds; 100 tokens come in the first quarter of each second
        total += 100.0 if quarter and quarter % 4 == 0 else 0.0
        stats = {"sampled_tokens_total": total}
        beat = Heartbeat("engine-0-0", "engine", 0, 0, 0, 1, 1, "ready", stats=stats)
        health.on_heartbeat(beat, quarter / 4)
        pictures.update()
        figures = pictures.snapshot("ok", 0.0, 0.0, lambda stage: None)
        [row] = [row for row in figures.stages if row.name == "engine"]
        assert row.rate == figures.tokens_per_s
        if quarter >= 20:
            assert row.rate == 100

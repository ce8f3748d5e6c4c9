"""The monitor of the web page: what it keeps, which figures it shows, and how its feeds end."""

from __future__ import annotations

import asyncio

import httpx
from gateway_pipeline import Gateway

from pipeinfer.control import (
    Observed,
    Prefix,
    Prefixes,
    RequestSpan,
    ShowPrefixes,
    StepMade,
    TimedEvent,
    Watch,
)
from pipeinfer.gateway import monitor as sights
from pipeinfer.gateway.health import ExpectedStage, Health
from pipeinfer.gateway.monitor import MAX_REQUESTS, PipelineMonitor, PipelineRates
from pipeinfer.messages import Heartbeat, Message

NOW = 1_000.0


def seeing(sight: PipelineMonitor, *spans: RequestSpan, steps: tuple[StepMade, ...] = ()) -> None:
    stage = spans[0].stage if spans else "scheduler-1"
    sight.on_message(Observed(stage, 1, spans, steps))


def step(at: float) -> StepMade:
    return StepMade(at, 0.01, 3, 0)


async def test_nothing_is_asked_or_kept_unless_somebody_looks() -> None:
    asked: list[tuple[str, Message]] = []
    sight = PipelineMonitor(("gateway-0", "engine-0-0"), lambda: NOW)
    sight.open(lambda stage, message: asked.append((stage, message)))
    seeing(sight, RequestSpan("gateway-0", "a", NOW))
    await asyncio.sleep(0)
    assert asked == [] and sight.spans("a") == []
    with sight.watching(), sight.watching():
        await asyncio.sleep(0)
        assert [stage for stage, _ in asked] == ["gateway-0", "engine-0-0"]
        seeing(sight, RequestSpan("gateway-0", "a", NOW))
        assert len(sight.spans("a")) == 1
    assert sight.spans("a") == []


async def test_each_looker_gets_what_is_new_to_it() -> None:
    sight = PipelineMonitor((), lambda: NOW)
    with sight.watching():
        seeing(sight, steps=(step(NOW - 100), step(NOW - 2), step(NOW - 1)))
        assert [one.at for one in sight.steps_since(0)] == [NOW - 2, NOW - 1]
        assert sight.steps_since(0)[0].group == 1
        seen = sight.changes
        seeing(sight, RequestSpan("gateway-0", "a", NOW), RequestSpan("gateway-0", "b", NOW))
        seen_then = sight.changes
        done = RequestSpan(
            "gateway-0", "a", NOW, NOW + 2, "stop", "",
            (
                TimedEvent(NOW, "accepted", {"prompt_tokens": 7.0}),
                TimedEvent(NOW + 1, "first_text", {"tokens": 1.0}),
                TimedEvent(NOW + 2, "finished", {"output_tokens": 9.0}),
            ),
        )  # fmt: skip
        seeing(sight, done)
        assert [one.id for one in sight.requests_since(seen)] == ["a", "b"]
        (shown,) = sight.requests_since(seen_then)
        assert (shown.prompt_tokens, shown.output_tokens, shown.finish) == (7, 9, "stop")
        assert (shown.first_token, shown.ended) == (NOW + 1, NOW + 2)
        assert sight.requests_since(sight.changes) == [] == sight.steps_since(sight.changes)


async def test_the_minute_before_somebody_looked_is_asked_for_and_kept_once() -> None:
    asked: list[Message] = []
    sight = PipelineMonitor(("scheduler-1",), lambda: NOW)
    sight.open(lambda _, message: asked.append(message))
    past = tuple(StepMade(NOW - 60 + half / 2, 0.01, 9, 0, 0.0, 4) for half in range(1, 120))
    with sight.watching():
        await asyncio.sleep(0)
        assert [one.past for one in asked if isinstance(one, Watch)] == [True]
        sight.on_message(Observed("scheduler-1", 1, (), (step(NOW),), past))
        shown = sight.steps_since(0)
        assert [one.at for one in shown] == [*(one.at for one in past), NOW]
        assert [one.count for one in shown] == [4] * 119 + [1]
        sight.on_message(Observed("scheduler-1", 1, (), (), past))  # another gateway's question
        assert sight.steps_since(0) == shown


async def test_the_oldest_requests_go() -> None:
    sight = PipelineMonitor((), lambda: NOW)
    with sight.watching():
        for number in range(MAX_REQUESTS + 5):
            seeing(sight, RequestSpan("gateway-0", str(number), NOW))
        assert sight.spans("4") == [] and len(sight.spans("5")) == 1
        assert len(sight.requests_since(0)) == MAX_REQUESTS


async def test_latencies_are_medians_of_ended_passages() -> None:
    sight = PipelineMonitor((), lambda: NOW)
    with sight.watching():
        for number, seconds in enumerate((1.0, 2.0, 9.0)):
            name, began = str(number), NOW - 10
            admitted = (TimedEvent(began + seconds / 2, "admitted"),)
            seeing(sight, RequestSpan("tokenizer-0", name, began, began + seconds))
            seeing(sight, RequestSpan("scheduler-0", name, began, NOW, "stop", "", admitted))
        seeing(sight, RequestSpan("tokenizer-0", "running", NOW))
        assert sight.latency("tokenizer-0") == 2.0
        assert sight.latency("scheduler-0") == 1.0
        assert sight.latency("engine-0-0") is None


async def test_prefixes_come_from_those_that_answer(monkeypatch) -> None:
    monkeypatch.setattr(sights, "ANSWER_TIMEOUT", 0.05)
    sight = PipelineMonitor(())
    found = (Prefix(5, 1, 0, b""),)

    def ask(stage: str, message: Message) -> None:
        assert isinstance(message, ShowPrefixes)
        if stage == "engine-0-0":
            sight.on_message(Prefixes("of somebody else", stage, ()))
            sight.on_message(Prefixes(message.question, stage, found))

    sight.open(ask)
    assert await sight.prefixes(["engine-0-0", "engine-1-0"], 3) == {"engine-0-0": found}


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


DRAIN = 300.0  # seconds that a gateway would wait for a request that runs
SOON = 60.0


async def test_a_feed_ends_when_its_gateway_leaves(gateway: Gateway) -> None:
    async with (
        httpx.AsyncClient(timeout=SOON) as client,
        client.stream("GET", f"{gateway.url}/monitor/events") as feed,
    ):
        lines = feed.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await asyncio.wait_for(gateway.driver.leave(DRAIN), SOON)
        async for _ in lines:  # to its end; a connection that breaks raises
            pass


def test_a_scheduler_says_how_its_last_lost_engine_was_replaced():
    health = Health([*STAGES, ExpectedStage("scheduler-0", "scheduler")])
    pictures = PipelineRates(health)

    def shown(**stats: float) -> str:
        beat = Heartbeat("scheduler-0", "scheduler", 0, 0, 0, 1, 1, "ready", stats=stats)
        health.on_heartbeat(beat, NOW)
        figures = pictures.snapshot("ok", NOW, NOW, lambda stage: None)
        [row] = [row for row in figures.stages if row.name == "scheduler"]
        return row.takeover

    assert shown(takeovers_total=0.0) == ""
    phases = {"restart": 2.2, "begin": 0.3, "first_token": 0.5, "last_token": 0.0}
    stats = {f"takeover_{phase}_seconds": took for phase, took in phases.items()}
    assert shown(takeovers_total=1.0, recomputed_tokens_total=1234.0, **stats) == (
        "1 takeover, the last in 3.00 s (restart 2.20, begin 0.30, first token 0.50, "
        "last token 0.00), 1,234 tokens recomputed"
    )

"""Passages through stages, derived from a recorded session, agree with the journeys of `replay`."""

from __future__ import annotations

import pytest
from preemptions import preempting_plans

from pipeinfer.control import RequestSpan, StepMade
from pipeinfer.core import Send
from pipeinfer.observe.observer import LastMinute
from pipeinfer.observe.spans import Exchange, SpanStore, span_observer
from pipeinfer.replay.timeline import RequestTimes, request_times
from pipeinfer.replay.traces import LoadedTrace, load


class Observed:
    """What the observer of one stage makes of its recording."""

    def __init__(self, recording: LoadedTrace) -> None:
        self.recording = recording
        self.ended: list[RequestSpan] = []
        self.steps: list[StepMade] = []
        self.longest = 0.0  # seconds of an exchange
        self.book = SpanStore(recording.stage, self.ended.append)
        watching = span_observer(recording.header.name, self.book)
        minute = LastMinute(0.5, self.steps.append)
        for exchange in recording.exchanges():
            entry = exchange.input
            sends = [Send(out.channel, out.peer, out.message) for out in exchange.outputs]
            ended = max([entry.time, *(out.time for out in exchange.outputs)])
            self.longest = max(self.longest, ended - entry.time)
            told = Exchange(entry.message, sends, entry.time, ended)
            watching.on_exchange(told)
            minute.on_exchange(told)

    def first(self, request_id: str, name: str) -> float | None:
        found = (m.at for p in self.ended if p.request_id == request_id for m in p.moments
                 if m.name == name)  # fmt: skip
        return next(found, None)

    def count(self, name: str) -> int:
        return sum(m.name == name for p in self.ended for m in p.moments)


@pytest.fixture(scope="module")
def seen(session) -> dict[str, Observed]:
    return {stage: Observed(load(path)) for stage, path in session.items()}


@pytest.fixture(scope="module")
def known(session) -> dict[str, dict[str, RequestTimes]]:
    """Of each stage alone."""
    return {stage: request_times([load(path)]) for stage, path in session.items()}


def test_every_request_passes_and_none_stays(seen, known):
    for stage, observed in seen.items():
        assert len(observed.book) == 0, stage
        assert len(observed.ended) > 100
        assert {p.request_id for p in observed.ended} == known[stage].keys() | {
            p.request_id for p in observed.ended if p.outcome in ("refused", "abort")
        }
        for passage in observed.ended:
            times = [passage.began, *(moment.at for moment in passage.moments), passage.ended]
            assert times == sorted(times), passage


@pytest.mark.parametrize(
    ("stage", "moment", "point"),
    [
        ("gateway", "submitted", "submitted"),
        ("tokenizer", "routed", "tokenized"),
        ("scheduler", "queued", "queued"),
        ("scheduler", "admitted", "admitted"),
        ("scheduler", "first_token", "token"),
        ("engine", "admitted", "planned"),
    ],
)
def test_moments_are_where_the_timeline_has_them(seen, known, stage, moment, point):
    observed, compared = seen[stage], 0
    for request_id, journey in known[stage].items():
        at = journey.first.get(point)
        if at is None:
            continue
        if (found := observed.first(request_id, moment)) is None:
            # It ended without a token: the row that says so is a mark of the timeline's as well.
            assert moment == "first_token" and journey.finish
            continue
        assert abs(found - at) <= observed.longest
        compared += 1
    assert compared > 100


def test_ends_are_those_of_the_recording(seen, known):
    compared = 0
    for stage in ("gateway", "scheduler", "detokenizer"):
        for passage in seen[stage].ended:
            journey = known[stage].get(passage.request_id)  # none if it left before any output
            finish = "" if journey is None else journey.finish
            if passage.outcome in ("stop", "length") and finish:
                assert passage.outcome == finish
                compared += 1
            elif finish:
                assert passage.outcome in ("abort", "error", "refused")
    assert compared > 200


def test_requests_give_way_where_they_did(seen):
    scheduler = seen["scheduler"]
    preempted = {p.request_id for p in scheduler.ended for m in p.moments if m.name == "preempted"}
    certain = set(preempting_plans(scheduler.recording).values())
    assert certain and certain <= preempted
    assert scheduler.count("admitted") == sum(
        len(e.message.admits) for e in scheduler.recording.entries if e.kind == "Plan"
    )


def test_steps_are_those_of_the_engine(seen):
    """One for each that the device computed, with all tokens that results tell of."""
    steps = seen["scheduler"].steps
    results = [e.message for e in seen["scheduler"].recording.entries if e.kind == "Result"]
    notes = [e.message for e in seen["engine"].recording.entries if e.kind == "StepNote"]
    assert len(steps) == sum(any(result.counts) for result in results)
    assert len(notes) == len(steps)
    assert sum(step.prompt_tokens + step.decodes for step in steps) <= sum(n.tokens for n in notes)
    assert sum(step.prompt_tokens + step.decodes for step in steps) > 1000
    assert all(0 < step.seconds < 30 and step.target == 0.5 for step in steps)
    begun = [step.at for step in steps]
    assert begun == sorted(begun)

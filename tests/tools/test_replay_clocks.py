"""Traces of several hosts on one clock: true offsets lie within the bounds that messages give."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeinfer.messages import PROTOCOL, Abort
from pipeinfer.replay.timeline import quantile
from pipeinfer.replay.traces import FAR, CannotReplay, LoadedTrace, TraceEntry, merged, offsets
from pipeinfer.trace.format import TraceHeader


def recording(stage: str, entries=(), monotonic=0.0, wall=0.0) -> LoadedTrace:
    header = TraceHeader(
        protocol=PROTOCOL, version="1", stage=stage, name=stage.partition("-")[0],
        monotonic=monotonic, wall=wall,
    )  # fmt: skip
    return LoadedTrace(Path(f"{stage}.pitrace"), header, list(entries))


def heard(
    receiver: str, sender: str, sent: float, took: float, clocks: dict[str, float]
) -> TraceEntry:
    """A message sent at true time `sent`, stamped by both stages' own clocks."""
    at = sent + took + clocks[receiver]
    return TraceEntry(0, at, "in", "work", sender, 0, sent + clocks[sender], Abort("r", 1), 1)


def talk(clocks: dict[str, float], hops: list[tuple[str, str]], seed=0) -> list[LoadedTrace]:
    source = random.Random(seed)
    entries: dict[str, list[TraceEntry]] = {stage: [] for stage in clocks}
    for n in range(200):
        for sender, receiver in hops:
            took = 0.0002 + source.expovariate(500)
            entries[receiver].append(heard(receiver, sender, n * 0.01, took, clocks))
    return [recording(stage, entries[stage]) for stage in clocks]


RING = [("gateway-0", "tokenizer-0"), ("tokenizer-0", "scheduler-0"), ("scheduler-0", "gateway-0")]


def test_offsets_are_found_over_one_way_hops_that_form_a_ring():
    clocks = {"gateway-0": 0.0, "tokenizer-0": -731.5, "scheduler-0": 90_000.25}
    found = offsets(talk(clocks, RING))
    for offset, true in zip(found, clocks.values(), strict=True):
        assert abs(offset.seconds - true) <= offset.error
        assert offset.error < 0.001


def test_stages_of_one_host_share_their_clock():
    clocks = dict.fromkeys(("gateway-0", "tokenizer-0", "scheduler-0"), 5_000.0)
    assert [o.seconds for o in offsets(talk(clocks, RING))] == [0.0, 0.0, 0.0]


def test_one_way_alone_falls_back_to_the_hosts_wall_clocks():
    clocks = {"gateway-0": 0.0, "tokenizer-0": 70.0}
    a, b = talk(clocks, [("gateway-0", "tokenizer-0")])
    a = recording("gateway-0", a.entries, monotonic=10.0, wall=1_000.0)
    b = recording("tokenizer-0", b.entries, monotonic=80.0, wall=1_000.0)
    found = offsets([a, b])[1]
    assert (found.seconds, found.error) == (70.0, FAR)


def test_merged_traces_have_no_message_that_arrives_before_it_was_sent():
    clocks = {"gateway-0": 3.0, "tokenizer-0": -40.0, "scheduler-0": 900.0}
    together = merged(talk(clocks, RING))
    moved = {r.stage: r.offset for r in together}
    for r in together:
        for entry in r.entries:
            assert entry.time >= entry.sent - moved[entry.peer] - 1e-9  # of rounding


def test_two_lives_of_one_stage_are_not_merged():
    with pytest.raises(CannotReplay, match=r"scheduler-0 was started again .* give one of "):
        merged([recording("scheduler-0"), recording("scheduler-0")])


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.99, 4), (1.0, 4), (0.25, 1)])
def test_quantiles_are_values_that_occurred(share, value):
    assert quantile([4, 1, 3, 2], share) == value

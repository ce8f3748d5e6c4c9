"""Recordings of a real run, as --record DIR writes them: its steps, requests and delays.

Reads traces through pipeinfer.replay. Knows no model of step times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from pipeinfer.messages import Plan, Result, Submit, Text, TokenizedRequest, Tokens, num_ids
from pipeinfer.replay.traces import CannotReplay, LoadedTrace, TraceEntry, load
from pipeinfer.settings import ConfigurationError
from pipeinfer.step_cost import StepCost
from pipeinfer.wire import unpack
from simulate.cluster import Deployment
from simulate.step_model import attended
from simulate.workloads import Arrival


@dataclass(frozen=True)
class MeasuredStep:
    """The arguments of StepModel.seconds, and the seconds from the end of the step before, or from
    its own launch if that was later, to its end."""

    decodes: int
    contexts: int
    tokens: int
    pairs: int
    seconds: float


def recordings(folder: Path) -> list[LoadedTrace]:
    """All traces in `folder`. ConfigurationError if there is none of an engine."""
    try:
        found = [load(path) for path in sorted(folder.glob("*.pitrace"))]
    except CannotReplay as error:
        raise ConfigurationError(str(error)) from None
    if not any(one.identity.name == "engine" for one in found):
        raise ConfigurationError(f"{folder} holds no recording of an engine")
    return found


def leads(recording: LoadedTrace) -> bool:
    """Whether it is of the rank of an engine that reports to the scheduler."""
    return recording.identity.name == "engine" and recording.identity.rank == 0


def steps(recording: LoadedTrace) -> Iterator[MeasuredStep]:
    """The steps of an engine, in order."""
    begun: dict[tuple[int, int], float] = {}
    taken: dict[tuple[int, int], float] = {}
    before = 0.0
    for entry in recording.entries:
        message = entry.message
        if entry.kind == "StepNote":
            begun[message.epoch, message.number] = entry.time
        elif entry.kind == "StepDone":
            launched = begun.pop((message.epoch, message.number), entry.time)
            taken[message.epoch, message.number] = entry.time - max(before, launched)
            before = entry.time
        elif isinstance(message, Result):
            seconds = taken.pop((message.epoch, message.number), 0.0)
            if seconds > 0:
                yield _step(message, seconds)


def steps_since(found: Sequence[LoadedTrace], begin: float) -> int:
    """Steps of all engines whose results came after `begin`, those without a row left out."""
    return sum(
        bool(unpack(entry.message.counts).any())
        for recording in found
        if leads(recording)
        for entry in recording.entries
        if isinstance(entry.message, Result) and entry.time > begin
    )


def _step(result: Result, seconds: float) -> MeasuredStep:
    starts, counts = unpack(result.starts), unpack(result.counts)
    one, more = counts == 1, counts > 1
    pairs = attended(starts[more].tolist(), counts[more].tolist())
    contexts = int(starts[one].sum()) + int(one.sum())
    return MeasuredStep(int(one.sum()), contexts, int(counts[more].sum()), pairs, seconds)


def entries(found: Sequence[LoadedTrace], name: str) -> Iterator[TraceEntry]:
    """What all stages called `name` took and gave."""
    for recording in found:
        if recording.identity.name == name:
            yield from recording.entries


@dataclass
class Stream:
    """A request: when the gateway sent it on, when pieces of its text came, how many tokens."""

    sent: float
    prompt: np.ndarray | None = None
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0


def streams(found: Sequence[LoadedTrace], skip: int) -> list[Stream]:
    """Requests that got tokens, in the order in which they came, without the first `skip`."""
    known: dict[str, Stream] = {}
    for entry in entries(found, "gateway"):
        message = entry.message
        if isinstance(message, Submit) and entry.direction == "out":
            known.setdefault(message.request_id, Stream(entry.time))
        elif isinstance(message, Text) and entry.direction == "in":
            for row in message.rows:
                stream = known.get(row.request_id)
                if stream is not None and row.ids:
                    stream.pieces.append(entry.time)
                    stream.tokens += num_ids(row.ids)
    for entry in entries(found, "scheduler"):
        if isinstance(entry.message, TokenizedRequest) and entry.message.request_id in known:
            known[entry.message.request_id].prompt = unpack(entry.message.prompt_ids)
    ordered = sorted(known.values(), key=lambda stream: stream.sent)[skip:]
    kept = [stream for stream in ordered if stream.tokens and stream.prompt is not None]
    if not kept:
        raise ConfigurationError("the recording holds no request that got a token")
    return kept


def arrivals(kept: Sequence[Stream]) -> list[Arrival]:
    """The same requests, the first of them at 0 seconds; each wants as many tokens as it got."""
    found: list[Arrival] = []
    for number, stream in enumerate(kept):
        assert stream.prompt is not None
        found.append(Arrival(number, stream.sent - kept[0].sent, stream.prompt, stream.tokens))
    return found


def deployment(found: Sequence[LoadedTrace]) -> tuple[Deployment, int, str]:
    """(each group, how many groups, routing policy), as the headers of the recordings say."""
    scheduler = next((one for one in found if one.identity.name == "scheduler"), None)
    engine = next((one for one in found if leads(one)), None)
    if scheduler is None or engine is None:
        raise ConfigurationError("there is no recording of a scheduler, or none of an engine")
    settings, facts = scheduler.header.settings, engine.header.facts
    group = Deployment(
        kv_pages=facts["pages"] - 1,  # without the dummy
        page_size=facts["page_size"],
        max_model_len=facts["max_model_len"],
        max_running=min(settings["max_running"], facts["max_slots"]),
        max_step_tokens=settings["max_step_tokens"] or facts["step_tokens"],
        mixed_step_tokens=settings["mixed_step_tokens"],
        itl_target=settings.get("itl_target", 0.0),
        ttft_target=settings.get("ttft_target", 0.0),
        policy=settings["policy"],
        overlap_depth=settings["overlap_depth"],
        cache=settings["cache"],
        step_cost=msgspec.convert(facts["step_cost"], StepCost | None),
    )
    return group, settings["dp"], settings["routing"]


QUANTILES = 100
BYTES = 4  # of a slot in a plan


def quantiles(parts: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Equally likely seconds, as many as QUANTILES, that stand for those in all `parts`; () for
    none."""
    every = [delay for part in parts for delay in part]
    if not every:
        return ()
    middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return tuple(np.quantile(every, middles).round(6).tolist())


def inbound(found: Sequence[LoadedTrace]) -> list[float]:
    """Seconds of each request from its gateway to its scheduler; [] where either is missing."""
    sent: dict[str, float] = {}
    for entry in entries(found, "gateway"):
        if isinstance(entry.message, Submit) and entry.direction == "out":
            sent.setdefault(entry.message.request_id, entry.time)
    heard: dict[str, float] = {}
    for entry in entries(found, "scheduler"):
        if isinstance(entry.message, TokenizedRequest):
            heard.setdefault(entry.message.request_id, entry.time)
    return [max(heard[name] - at, 0.0) for name, at in sent.items() if name in heard]


def turnaround(engine: LoadedTrace) -> list[float]:
    """Seconds from the end of a step until the engine launched the one that was planned upon it."""
    return _waits(engine, engine.header.settings["overlap_depth"])


def bubble(engine: LoadedTrace) -> list[float]:
    """Seconds from the end of a step until the engine launched the next, 0 if it had before; of
    engines that have several steps under way, else nothing."""
    if engine.header.settings["overlap_depth"] < 2:
        return []
    return [max(seconds, 0.0) for seconds in _waits(engine, 1)]


def _waits(engine: LoadedTrace, steps: int) -> list[float]:
    """Seconds from the end of a step until that which is so many `steps` later was launched."""
    launches, ends = _launches(engine)
    return [
        launched - ends[epoch, number - steps]
        for (epoch, number), launched in launches.items()
        if (epoch, number - steps) in ends
    ]


def _launches(engine: LoadedTrace) -> tuple[dict[tuple[int, int], float], ...]:
    """When steps (epoch, number) were launched in which rows of others go on, so that nothing was
    idle before them; and when steps ended."""
    launches: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    goes_on: set[tuple[int, int]] = set()
    for entry in engine.entries:
        message = entry.message
        if isinstance(message, Plan) and len(message.slots) > BYTES * len(message.admits):
            goes_on.add((message.epoch, message.number))
        elif entry.kind == "StepDone":
            ends[message.epoch, message.number] = entry.time
        elif entry.kind == "StepNote" and (message.epoch, message.number) in goes_on:
            launches[message.epoch, message.number] = entry.time
    return launches, ends


def outbound(found: Sequence[LoadedTrace]) -> list[tuple[int, float]]:
    """Rows of text of steps, and seconds from a step's end until a gateway had it.

    Only of steps that ended when the text of the one before had arrived: what waits behind other
    messages does not show how long a message takes."""
    ends, arrived = _ends(found), _arrivals(found)
    delays: list[tuple[int, float]] = []
    for recording in found:
        if recording.identity.name != "scheduler":
            continue
        before = 0.0
        for end, rows, token in _sends(recording, ends):
            seen = arrived.get(token)
            if seen is None:
                continue
            if end >= before:
                delays.append((rows, max(seen - end, 0.0)))
            before = max(before, seen)
    return delays


def _ends(found: Sequence[LoadedTrace]) -> dict[tuple[int, int, int], float]:
    """When the step (group, epoch, number) ended."""
    return {
        (recording.identity.group, entry.message.epoch, entry.message.number): entry.time
        for recording in found
        if leads(recording)
        for entry in recording.entries
        if entry.kind == "StepDone"
    }


def _sends(
    recording: LoadedTrace, ends: dict[tuple[int, int, int], float]
) -> list[tuple[float, int, tuple[str, int]]]:
    """Of each step whose tokens a scheduler sent: when it ended, its rows, and one token of it as
    (request, place among its outputs)."""
    sends: list[tuple[float, int, tuple[str, int]]] = []
    end: float | None = None
    for entry in recording.entries:
        message = entry.message
        if isinstance(message, Result):
            end = ends.get((recording.identity.group, message.epoch, message.number))
        elif isinstance(message, Tokens) and end is not None:
            rows = [row for row in message.rows if row.ids]
            sends += [(end, len(rows), (row.request_id, row.offset)) for row in rows[:1]]
            end = None
    return sends


def _arrivals(found: Sequence[LoadedTrace]) -> dict[tuple[str, int], float]:
    """When a gateway had the text of a token (request, place among its outputs)."""
    return {
        (row.request_id, row.token_offset): entry.time
        for entry in entries(found, "gateway")
        if isinstance(entry.message, Text) and entry.direction == "in"
        for row in entry.message.rows
    }

"""How long messages are under way, as recordings of a real run show: all that a step is not.

Reads traces through fitting.py. Knows no model of step times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pipeinfer.messages import Plan, Result, Submit, Text, Tokens, Work
from pipeinfer.replay.traces import LoadedTrace
from simulate import fitting
from simulate.fitting import nonnegative

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


def by_row(parts: Iterable[Sequence[tuple[int, float]]]) -> tuple[float, tuple[float, ...]]:
    """(seconds for each row, quantiles of what is left without them) of (rows, seconds)."""
    every = np.array([one for part in parts for one in part]).reshape(-1, 2)
    rows, seconds = every.T
    line = np.stack([np.ones(len(every)), rows], axis=1)
    rate = float(nonnegative(line, seconds)[1]) if len(every) else 0.0
    return rate, quantiles([np.maximum(seconds - rate * rows, 0.0).tolist()])


def inbound(found: Sequence[LoadedTrace]) -> list[float]:
    """Seconds of each request from its gateway to its scheduler; [] where either is missing."""
    sent: dict[str, float] = {}
    for entry in fitting.entries(found, "gateway"):
        if isinstance(entry.message, Submit) and entry.direction == "out":
            sent.setdefault(entry.message.request_id, entry.time)
    heard: dict[str, float] = {}
    for entry in fitting.entries(found, "scheduler"):
        if isinstance(entry.message, Work):
            heard.setdefault(entry.message.request_id, entry.time)
    return [max(heard[name] - at, 0.0) for name, at in sent.items() if name in heard]


def turnaround(engine: LoadedTrace) -> list[float]:
    """Seconds from the end of a step until the engine launched the one that was planned upon it."""
    depth = engine.header.settings["overlap_depth"]
    launches, ends = _launches(engine)
    found: list[float] = []
    for (epoch, number), launched in launches.items():
        end = ends.get((epoch, number - depth))
        if end is not None:
            found.append(launched - end)
    return found


def bubble(engine: LoadedTrace) -> list[float]:
    """Seconds from the end of a step until the engine launched the next, 0 if it had before; of
    engines that have several steps under way, else nothing."""
    if engine.header.settings["overlap_depth"] < 2:
        return []
    launches, ends = _launches(engine)
    found: list[float] = []
    for (epoch, number), launched in launches.items():
        end = ends.get((epoch, number - 1))
        if end is not None:
            found.append(max(launched - end, 0.0))
    return found


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
        if fitting.leads(recording)
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
        for entry in fitting.entries(found, "gateway")
        if isinstance(entry.message, Text) and entry.direction == "in"
        for row in entry.message.rows
    }

"""Each request's way through the stages: when it came to which point, on one common clock.

Knows which message of which stage marks which point; nothing of how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeinfer.core import LOCAL
from pipeinfer.replay.recording import Entry, Recording

# In the order in which a request comes to them.
POINTS = ("called", "submitted", "tokenized", "queued", "admitted", "planned",
          "token", "text", "shown")  # fmt: skip
OUTPUT = ("shown", "text", "token")  # where output is seen, as far down the pipeline as is known


@dataclass
class Journey:
    """Times in seconds on the common clock. `first`: of each of POINTS, the first time.

    visits: (time, stage, seq) of every entry that was about the request and marked a point. latest,
    gaps: of each of POINTS, the last time, and the longest from one time to the next.
    ended: the latest sign of its end, and `finish` how. admissions: 2 or more after a preemption.
    """

    request_id: str
    first: dict[str, float] = field(default_factory=dict)
    visits: list[tuple[float, str, int]] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    ended: float | None = None
    finish: str = ""
    admissions: int = 0

    @property
    def begun(self) -> float | None:
        return min(self.first.values()) if self.first else None

    def between(self, earlier: str, later: str) -> float | None:
        """Seconds from one point to another; None if it did not come to both."""
        if earlier not in self.first or later not in self.first:
            return None
        return self.first[later] - self.first[earlier]

    @property
    def queue(self) -> float | None:
        """Seconds that it waited in the scheduler for a slot."""
        return self.between("queued", "admitted")

    @property
    def to_first_token(self) -> float | None:
        """Seconds from its first sign to its first output, as far down the pipeline as is known."""
        shown = next((self.first[p] for p in OUTPUT if p in self.first), None)
        return None if shown is None or self.begun is None else shown - self.begun

    @property
    def longest_gap(self) -> float | None:
        """Seconds between two outputs, where they were furthest apart; None if there was one."""
        return next((self.gaps[p] for p in OUTPUT if p in self.gaps), None)

    @property
    def whole(self) -> float | None:
        """Seconds from its first sign to its end."""
        return None if self.ended is None or self.begun is None else self.ended - self.begun


def journeys(recordings: Iterable[Recording]) -> dict[str, Journey]:
    """All requests of the recordings, by id, in the order of their beginning.

    The recordings' times are on one clock already.
    """
    found: dict[str, Journey] = {}
    for recording in recordings:
        for entry in recording.entries:
            for request_id, point, finish in _marks(recording.stage.partition("-")[0], entry):
                journey = found.setdefault(request_id, Journey(request_id))
                _mark(journey, recording.stage, entry, point, finish)
    for journey in found.values():
        journey.visits.sort()
    return dict(sorted(found.items(), key=lambda item: item[1].begun or float("inf")))


def _mark(journey: Journey, stage: str, entry: Entry, point: str, finish: str) -> None:
    if point == "admitted":
        journey.admissions += 1
    if point in journey.latest:
        gap = entry.time - journey.latest[point]
        journey.gaps[point] = max(gap, journey.gaps.get(point, 0.0))
    journey.latest[point] = entry.time
    known = journey.first.get(point)
    if known is None or entry.time < known:
        journey.first[point] = entry.time
    if known is None or finish or point == "admitted":
        journey.visits.append((entry.time, stage, entry.seq))
    if finish and (journey.ended is None or entry.time >= journey.ended):
        journey.ended, journey.finish = entry.time, finish


Marks = list[tuple[str, str, str]]


def _marks(stage: str, entry: Entry) -> Marks:
    """(request id, point, how it ended if it did) for each request that the entry moved on."""
    key = (stage, entry.direction, entry.kind)
    message = entry.message
    if key in _SINGLE:
        return [(message.request_id, _SINGLE[key], "")]
    if key == ("scheduler", "out", "Plan"):
        return [(admit.request_id, "admitted", "") for admit in message.admits]
    if key == ("engine", "in", "Plan"):
        return [(admit.request_id, "planned", "") for admit in message.admits]
    if key in _ROWS:
        rows = [row for row in message.rows if row.ids or row.finish]
        return [(row.request_id, _ROWS[key], row.finish or "") for row in rows]
    if stage == "gateway" and entry.direction == "out" and entry.channel == LOCAL:
        if entry.kind == "Delta":
            return [(message.request_id, "shown", message.finish or "")]
        if entry.kind == "Failed":
            return [(message.request_id, "shown", f"error {message.status}")]
    return []


_SINGLE = {
    ("gateway", "in", "Call"): "called",
    ("gateway", "out", "Submit"): "submitted",
    ("tokenizer", "out", "Work"): "tokenized",
    ("scheduler", "in", "Work"): "queued",
}
_ROWS = {
    ("scheduler", "out", "Tokens"): "token",
    ("detokenizer", "out", "Text"): "text",
}

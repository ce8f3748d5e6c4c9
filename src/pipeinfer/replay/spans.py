"""Recordings as spans on rows, and each request's way over them: what every timeline draws.

Times are seconds since the earliest of all. Knows entries and journeys; neither Perfetto nor HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipeinfer.replay.describe import line
from pipeinfer.replay.journeys import Journey, journeys
from pipeinfer.replay.recording import Entry, Exchange, Recording
from pipeinfer.replay.subjects import Subjects

ORDER = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")
ROWS = ("core", "in flight 0", "in flight 1", "prepare", "forward")  # of a stage, downwards
SHORTEST = 1e-6  # seconds; what is shorter could not be seen or clicked
SILENT = frozenset({"Tick", "Heartbeat", "RankStatus"})  # not drawn unless something came of them


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from `start` to `end` on row `row` of stage `stage`.

    seqs: of the input, or the plan, that it belongs to, and of what was sent within. detail: that
    message as text.
    """

    stage: str
    row: str
    start: float
    end: float
    name: str
    seqs: tuple[int, ...]
    requests: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Flow:
    """One request's way: (seconds, stage, row) from its beginning to its last token, in order."""

    request_id: str
    points: tuple[tuple[float, str, str], ...]


@dataclass
class Picture:
    """rows: (stage, row) from top to bottom."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    seconds: float = 0.0


def picture(
    recordings: Sequence[Recording],
    begin: float = 0.0,
    end: float = float("inf"),
    request: str | None = None,
) -> Picture:
    """Everything that touches begin..end (seconds since the earliest entry), all or that of one
    request. The recordings are on one clock."""
    ordered = sorted(recordings, key=lambda r: (ORDER.index(r.header.name), r.stage))
    zero = min((r.begin for r in ordered if r.entries), default=0.0)
    drawn = Picture()
    for recording in ordered:
        spans = list(_spans(recording, zero))
        for row in ROWS:
            mine = [span for span in spans if span.row == row]
            placed = _in_turn(mine) if row == "forward" else _apart(mine)
            shown = [
                span
                for span in placed  # as they are drawn: apart, they may end before they did
                if span.end >= begin and span.start <= end
                and (request is None or request in span.requests)
            ]  # fmt: skip
            if shown:
                drawn.rows.append((recording.stage, row))
                drawn.spans += shown
    inside = {(span.stage, seq) for span in drawn.spans for seq in span.seqs}
    for journey in journeys(ordered).values():
        if request in (None, journey.request_id):
            flow = _flow(journey, zero, inside)
            if len(flow.points) > 1:
                drawn.flows.append(flow)
    drawn.seconds = max((span.end for span in drawn.spans), default=0.0)
    return drawn


def _spans(recording: Recording, zero: float) -> Iterator[Span]:
    subjects = Subjects()
    steps = Steps(recording.stage, subjects, zero)
    for exchange in recording.exchanges():
        entry, outputs = exchange.input, exchange.outputs
        requests = dict.fromkeys(subjects.of(entry.message))
        for output in outputs:
            requests |= dict.fromkeys(subjects.of(output.message))
        yield from steps.of(exchange)
        if entry.kind in SILENT and not outputs:
            continue
        end = max([entry.time + SHORTEST, *(output.time for output in outputs)])
        sent = Counter(name_of(output) for output in outputs)
        text = "".join(f"; {count}x {name}" if count > 1 else f"; {name}"
                       for name, count in sent.items())  # fmt: skip
        seqs = (entry.seq, *(output.seq for output in outputs))
        yield Span(
            recording.stage, "core", entry.time - zero, end - zero, name_of(entry), seqs,
            tuple(requests), f"{line(entry.message)}{text}",
        )  # fmt: skip


def _apart(spans: list[Span]) -> list[Span]:
    """Spans of one row, none of which reaches into the next: times are those of handling, and a
    report may be handled after the next thing has begun."""
    spans = sorted(spans, key=lambda span: span.start)
    return [
        replace(span, end=min(span.end, after.start)) if span.start < after.start else span
        for span, after in pairwise(spans)
    ] + spans[-1:]


def _in_turn(spans: list[Span]) -> list[Span]:
    """Steps of a device in their order. The end of one is known only when its report is handled,
    but it was over when the next one began: what reaches into the next is moved back."""
    moved: list[Span] = []
    next_start = float("inf")
    for span in reversed(spans):
        late = max(span.end - next_start, 0.0)
        moved.append(replace(span, start=span.start - late, end=span.end - late))
        next_start = moved[-1].start
    return moved[::-1]


class Steps:
    """Spans of steps: in the scheduler from plan to result, in the engine on its two streams."""

    def __init__(self, stage: str, subjects: Subjects, zero: float) -> None:
        self._stage, self._subjects, self._zero = stage, subjects, zero
        self._begun: dict[tuple[int, int], tuple[float, int, str]] = {}

    def of(self, exchange: Exchange) -> Iterator[Span]:
        entry = exchange.input
        if entry.kind == "Plan":  # an engine prepares it until the step is with the device
            step = (entry.message.epoch, entry.message.number)
            given = next((n for n in exchange.notes if n.kind == "StepNote"), None)
            if given is not None:
                text = line(given.message)
                self._begun[step] = (given.time, entry.seq, text)
                yield self._span("prepare", entry.time, given.time, step, entry.seq, text)
        elif entry.kind == "StepDone":
            step = (entry.message.epoch, entry.message.number)
            begun = self._begun.pop(step, None)
            if begun is not None:
                given, seq, text = begun
                start = max(given, entry.time - entry.message.seconds)
                yield self._span("forward", start, entry.time, step, seq, text)
        elif entry.kind == "Result":
            step = (entry.message.epoch, entry.message.number)
            begun = self._begun.pop(step, None)
            if begun is not None:
                sent, seq, text = begun
                row = f"in flight {step[1] % 2}"
                yield self._span(row, sent, entry.time, step, seq, text)
        for output in exchange.outputs:
            if output.kind == "Plan":
                step = (output.message.epoch, output.message.number)
                self._begun[step] = (output.time, output.seq, line(output.message))

    def _span(
        self, row: str, start: float, end: float, step: tuple[int, int], seq: int, text: str
    ) -> Span:
        requests = tuple(dict.fromkeys(self._subjects.rows(*step).values()))
        end = max(end, start + SHORTEST)
        return Span(
            self._stage, row, start - self._zero, end - self._zero, f"step {step[1]}",
            (seq,), requests, text,
        )  # fmt: skip


def name_of(entry: Entry) -> str:
    """The message's type, and its plan's number where it has one."""
    number = getattr(entry.message, "number", None)
    return entry.kind if number is None else f"{entry.kind} {number}"


def _flow(journey: Journey, zero: float, inside: set[tuple[str, int]]) -> Flow:
    """Its visits that are drawn. Two at one moment on one stage are one point."""
    points: dict[tuple[float, str, str], None] = {}
    for time, stage, seq in journey.visits:
        if (stage, seq) in inside:
            points[time - zero, stage, "core"] = None
    return Flow(journey.request_id, tuple(points))

"""`timeline FILE ...`: traces as a timeline, for the browser or for Perfetto.

Spans of stages, requests and steps on one time axis, and the flows of requests between them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from pipeinfer.params import JsonObject
from pipeinfer.replay.compare import line
from pipeinfer.replay.rebuild import Subjects
from pipeinfer.replay.show import RequestTimes, request_times
from pipeinfer.replay.traces import (
    EQUAL,
    USAGE,
    CannotReplay,
    LoadedTrace,
    TraceEntry,
    TraceExchange,
    load_merged,
    warn_of_tail,
)

ORDER = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")
ROWS = ("core", "in flight 0", "in flight 1", "prepare", "forward")  # of a stage, downwards
SHORTEST = 1e-6  # seconds; what is shorter could not be seen or clicked
SILENT = frozenset({"Tick", "Heartbeat", "RankStatus"})  # not drawn unless something came of them


@dataclass(frozen=True, slots=True)
class TimelineSpan:
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
class TraceTimeline:
    """rows: (stage, row) from top to bottom."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    spans: list[TimelineSpan] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    seconds: float = 0.0


def build_timeline(
    recordings: Sequence[LoadedTrace],
    begin: float = 0.0,
    end: float = float("inf"),
    request: str | None = None,
) -> TraceTimeline:
    """Everything that touches begin..end (seconds since the earliest entry), all or that of one
    request. The recordings are on one clock."""
    ordered = sorted(recordings, key=lambda r: (ORDER.index(r.header.name), r.stage))
    zero = min((r.begin for r in ordered if r.entries), default=0.0)
    drawn = TraceTimeline()
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
    for journey in request_times(ordered).values():
        if request in (None, journey.request_id):
            flow = _flow(journey, zero, inside)
            if len(flow.points) > 1:
                drawn.flows.append(flow)
    drawn.seconds = max((span.end for span in drawn.spans), default=0.0)
    return drawn


def _spans(recording: LoadedTrace, zero: float) -> Iterator[TimelineSpan]:
    subjects = Subjects()
    steps = StepSpans(recording.stage, subjects, zero)
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
        yield TimelineSpan(
            recording.stage, "core", entry.time - zero, end - zero, name_of(entry), seqs,
            tuple(requests), f"{line(entry.message)}{text}",
        )  # fmt: skip


def _apart(spans: list[TimelineSpan]) -> list[TimelineSpan]:
    """Spans of one row, none of which reaches into the next: times are those of handling, and a
    report may be handled after the next thing has begun."""
    spans = sorted(spans, key=lambda span: span.start)
    return [
        replace(span, end=min(span.end, after.start)) if span.start < after.start else span
        for span, after in pairwise(spans)
    ] + spans[-1:]


def _in_turn(spans: list[TimelineSpan]) -> list[TimelineSpan]:
    """Steps of a device in their order. The end of one is known only when its report is handled,
    but it was over when the next one began: what reaches into the next is moved back."""
    moved: list[TimelineSpan] = []
    next_start = float("inf")
    for span in reversed(spans):
        late = max(span.end - next_start, 0.0)
        moved.append(replace(span, start=span.start - late, end=span.end - late))
        next_start = moved[-1].start
    return moved[::-1]


class StepSpans:
    """Spans of steps: in the scheduler from plan to result, in the engine on its two streams."""

    def __init__(self, stage: str, subjects: Subjects, zero: float) -> None:
        self._stage, self._subjects, self._zero = stage, subjects, zero
        self._begun: dict[tuple[int, int], tuple[float, int, str]] = {}

    def of(self, exchange: TraceExchange) -> Iterator[TimelineSpan]:
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
    ) -> TimelineSpan:
        requests = tuple(dict.fromkeys(self._subjects.rows(*step).values()))
        end = max(end, start + SHORTEST)
        return TimelineSpan(
            self._stage, row, start - self._zero, end - self._zero, f"step {step[1]}",
            (seq,), requests, text,
        )  # fmt: skip


def name_of(entry: TraceEntry) -> str:
    """The message's type, and its plan's number where it has one."""
    number = getattr(entry.message, "number", None)
    return entry.kind if number is None else f"{entry.kind} {number}"


def _flow(journey: RequestTimes, zero: float, inside: set[tuple[str, int]]) -> Flow:
    """Its visits that are drawn. Two at one moment on one stage are one point."""
    points: dict[tuple[float, str, str], None] = {}
    for time, stage, seq in journey.visits:
        if (stage, seq) in inside:
            points[time - zero, stage, "core"] = None
    return Flow(journey.request_id, tuple(points))


TEMPLATE = Path(__file__).with_name("page.html")
DATA_PLACEHOLDER = "/*DATA*/null"
MICRO = 1e6  # microseconds in a second


def html(picture: TraceTimeline) -> str:
    """The page. Names and details are data, never markup."""
    data = json.dumps(_compact(picture), separators=(",", ":"))
    # What could end the script element from within a string.
    return TEMPLATE.read_text().replace(DATA_PLACEHOLDER, data.replace("<", "\\u003c"))


def _compact(picture: TraceTimeline) -> dict[str, object]:
    """Rows, spans [row, start µs, length µs, name, seq, requests, detail] with requests as numbers,
    flows [request, [µs, row], ...]."""
    rows = {row: at for at, row in enumerate(picture.rows)}
    names: dict[str, int] = {}
    for span in picture.spans:
        for name in span.requests:
            names.setdefault(name, len(names))
    for flow in picture.flows:
        names.setdefault(flow.request_id, len(names))
    spans = [
        [
            rows[s.stage, s.row], round(s.start * MICRO, 1), round((s.end - s.start) * MICRO, 1),
            s.name, s.seqs[0], [names[name] for name in s.requests], s.detail,
        ]
        for s in picture.spans
    ]  # fmt: skip
    flows = [
        [
            names[f.request_id],
            [[round(t * MICRO, 1), rows[stage, row]] for t, stage, row in f.points],
        ]
        for f in picture.flows
    ]
    return {
        "rows": [f"{stage} {row}" for stage, row in picture.rows],
        "requests": list(names),
        "spans": spans,
        "flows": flows,
        "begin": round(min((s.start for s in picture.spans), default=0.0) * MICRO, 1),
        "length": round(picture.seconds * MICRO, 1),
    }


def events(picture: TraceTimeline) -> list[JsonObject]:
    """One process for each stage, one thread for each of its rows, one flow for each request."""
    stages = list(dict.fromkeys(stage for stage, _ in picture.rows))
    pids = {stage: at for at, stage in enumerate(stages, 1)}
    tids = {row: at for at, row in enumerate(picture.rows, 1)}
    out: list[JsonObject] = []
    for stage, pid in pids.items():
        out.append(_named("process_name", pid, 0, stage))
        out.append(_sorted("process_sort_index", pid, 0, pid))
    for (stage, row), tid in tids.items():
        out.append(_named("thread_name", pids[stage], tid, row))
        out.append(_sorted("thread_sort_index", pids[stage], tid, tid))
    for span in picture.spans:
        out.append(
            {
                "ph": "X", "name": span.name, "cat": span.row, "pid": pids[span.stage],
                "tid": tids[span.stage, span.row], "ts": span.start * MICRO,
                "dur": (span.end - span.start) * MICRO,
                "args": {"seq": span.seqs[0], "requests": list(span.requests),
                         "message": span.detail},
            }
        )  # fmt: skip
    for number, flow in enumerate(picture.flows, 1):
        last = len(flow.points) - 1
        for at, (seconds, stage, row) in enumerate(flow.points):
            event = {
                "ph": "s" if at == 0 else "f" if at == last else "t", "id": number,
                "name": flow.request_id, "cat": "request", "pid": pids[stage],
                "tid": tids[stage, row], "ts": seconds * MICRO,
            }  # fmt: skip
            if at == last:
                event["bp"] = "e"  # to the slice around it, not to the next one
            out.append(event)
    return out


def _named(kind: str, pid: int, tid: int, name: str) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _sorted(kind: str, pid: int, tid: int, at: int) -> JsonObject:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": at}}


def add_timeline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, metavar="FILE", nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="X.html|X.json")
    parser.add_argument("--request", metavar="ID", help="only what is about this request")
    parser.add_argument("--from", dest="begin", type=float, default=0.0, metavar="S")
    parser.add_argument("--to", dest="end", type=float, default=float("inf"), metavar="S",
                        help="seconds since the earliest message")  # fmt: skip


def replay_timeline(options: argparse.Namespace) -> int:
    kind = options.out.suffix
    if kind not in (".html", ".json"):
        raise CannotReplay(USAGE, f"--out {options.out}: a timeline is an .html or a .json file")
    recordings = load_merged(options.files)
    for recording in recordings:
        warn_of_tail(recording)
        if recording.offset:
            print(f"{recording.stage}: its clock is {recording.offset:+.6f} s off, corrected")
    drawn = build_timeline(recordings, options.begin, options.end, options.request)
    if kind == ".json":
        text = json.dumps(events(drawn), separators=(",", ":"))
    else:
        text = html(drawn)
    try:
        options.out.write_text(text)
    except OSError as error:
        raise CannotReplay(USAGE, f"cannot write {options.out}: {error.strerror}") from None
    print(
        f"{options.out}: {len(drawn.spans)} spans on {len(drawn.rows)} rows, "
        f"{len(drawn.flows)} requests, {drawn.seconds:.3f} s"
    )
    return EQUAL

"""Messages of traces in forms for people; only reads, and knows no core:

- `show FILE`: the messages of a trace as a table, all or those of a request, channel or type
- `stats FILE ...`: counts, bytes and latencies of traces, and where the time of each request went
- `timeline FILE ...`: spans of stages, requests and steps on one time axis, and the flows of
  requests between them, for the browser or for Perfetto
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from pipeinfer.command_line import counted
from pipeinfer.core import LOCAL
from pipeinfer.params import JsonObject
from pipeinfer.replay.traces import (
    EQUAL,
    USAGE,
    CannotReplay,
    LoadedTrace,
    Subjects,
    TraceEntry,
    TraceExchange,
    arrow,
    line,
    load,
    load_merged,
    warn_of_tail,
)

WIDE = 110


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--request", metavar="ID", help="those about this request")
    parser.add_argument("--channel", metavar="C")
    parser.add_argument("--type", metavar="T", help="a message type, such as Plan")
    parser.add_argument("--from", dest="begin", type=float, default=0.0, metavar="S")
    parser.add_argument("--to", dest="end", type=float, default=float("inf"), metavar="S",
                        help="seconds since the trace's first message")  # fmt: skip
    parser.add_argument("--width", type=int, default=WIDE, help="characters of a message shown")


def replay_show(options: argparse.Namespace) -> int:
    recording = load(options.file)
    print(recording.title)
    print(f"{'seq':>7} {'time':>10}  {'with':<18} {'channel':<9} {'message':<11} about")
    for entry, ids in chosen(recording.entries, options):
        seconds = entry.time - recording.begin
        print(
            f"{entry.seq:>7} {seconds:>10.4f}  {arrow(entry):<18} {entry.channel:<9} "
            f"{entry.kind:<11} {about(ids)}{line(entry.message, options.width)}"
        )
    warn_of_tail(recording)
    return EQUAL


def about(ids: tuple[str, ...]) -> str:
    """A prefix of a line that names one request, or counts several; "" for none."""
    if len(ids) == 1:
        return f"{ids[0]}: "
    return f"{counted(len(ids), 'request')}: " if ids else ""


def chosen(
    entries: list[TraceEntry], options: argparse.Namespace
) -> Iterator[tuple[TraceEntry, tuple[str, ...]]]:
    """The entries that all filters let through, each with the requests it is about."""
    subjects = Subjects()
    begin = entries[0].time if entries else 0.0
    for entry in entries:
        ids = subjects.of(entry)
        if (
            (options.request is None or options.request in ids)
            and options.channel in (None, entry.channel)
            and options.type in (None, entry.kind)
            and options.begin <= entry.time - begin <= options.end
        ):
            yield entry, ids


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = max(0, min(len(ordered) - 1, -(-int(share * len(ordered) * 1e9) // 10**9) - 1))
    return ordered[rank]


def milliseconds(values: Sequence[float]) -> str:
    """`p50 0.21  p99 1.40  max 3.10 ms` of seconds, or a dash."""
    if not values:
        return "-"
    p50, p99, most = (1e3 * v for v in (quantile(values, 0.5), quantile(values, 0.99), max(values)))
    return f"p50 {p50:.2f}  p99 {p99:.2f}  max {most:.2f} ms"


# In the order in which a request comes to them.
POINTS = ("called", "submitted", "tokenized", "queued", "admitted", "planned",
          "token", "text", "shown")  # fmt: skip
OUTPUT = ("shown", "text", "token")  # where output is seen, as far down the pipeline as is known


@dataclass
class RequestTimes:
    """Times in seconds on the common clock.

    Attributes:
    - first: of each of POINTS, the first time
    - visits: (time, stage, seq) of every entry that was about the request and marked a point
    - latest, gaps: of each of POINTS, the last time, and the longest from one time to the next
    - ended: the latest sign of its end, and `finish` how
    - admissions: 2 or more after a preemption
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


def request_times(recordings: Iterable[LoadedTrace]) -> dict[str, RequestTimes]:
    """All requests of the recordings, by id, in the order of their beginning.

    The recordings' times are on one clock already.
    """
    found: dict[str, RequestTimes] = {}
    for recording in recordings:
        for entry in recording.entries:
            for request_id, point, finish in _marks(recording.stage.partition("-")[0], entry):
                journey = found.setdefault(request_id, RequestTimes(request_id))
                _mark(journey, recording.stage, entry, point, finish)
    for journey in found.values():
        journey.visits.sort()
    return dict(sorted(found.items(), key=lambda item: item[1].begun or float("inf")))


def _mark(journey: RequestTimes, stage: str, entry: TraceEntry, point: str, finish: str) -> None:
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


def _marks(stage: str, entry: TraceEntry) -> Marks:
    """(request id, point, how it ended if it did) for each request that the entry moved on."""
    key = (stage, entry.direction, entry.kind)
    message = entry.message
    if not entry.counts:
        return []
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
        if entry.kind == "OutputDelta":
            return [(message.request_id, "shown", message.finish or "")]
        if entry.kind == "Failed":
            return [(message.request_id, "shown", f"error {message.status}")]
    return []


_SINGLE = {
    ("gateway", "in", "Call"): "called",
    ("gateway", "out", "Submit"): "submitted",
    ("tokenizer", "out", "TokenizedRequest"): "tokenized",
    ("scheduler", "in", "TokenizedRequest"): "queued",
}
_ROWS = {
    ("scheduler", "out", "Tokens"): "token",
    ("detokenizer", "out", "Text"): "text",
}


SLOWEST = 5


def add_stats_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, metavar="FILE", nargs="+")
    parser.add_argument("--slowest", type=int, default=SLOWEST, metavar="N",
                        help="how many of the slowest requests are listed")  # fmt: skip


def replay_stats(options: argparse.Namespace) -> int:
    recordings = load_merged(options.files)
    for recording in recordings:
        print(recording.title)
        print_counts(recording)
        warn_of_tail(recording)
    print_hops(recordings)
    print_requests(list(request_times(recordings).values()), options.slowest)
    return EQUAL


def print_counts(recording: LoadedTrace) -> None:
    """A row for each direction, channel and type."""
    counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in recording.entries:
        count = counts[entry.direction, entry.channel, entry.kind]
        count[0] += 1
        count[1] += entry.size
    seconds = recording.seconds or 1.0
    print(f"  {'':<5}{'channel':<10}{'type':<13}{'count':>8}{'per s':>10}{'bytes':>12}")
    for (direction, channel, kind), (count, size) in sorted(counts.items()):
        print(
            f"  {direction:<5}{channel:<10}{kind:<13}{count:>8}{count / seconds:>10.1f}{size:>12,}"
        )


def print_hops(recordings: Sequence[LoadedTrace]) -> None:
    """From sending to the moment at which the receiver's core took it, by sender and channel."""
    sent_by = {recording.stage: recording for recording in recordings}
    hops: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for recording in recordings:
        for entry in recording.entries:
            if entry.direction == "in" and entry.sent and entry.peer in sent_by:
                sent = entry.sent - sent_by[entry.peer].offset
                hops[entry.peer, recording.stage, entry.channel].append(entry.time - sent)
    if hops:
        print("hops, from sending to handling")
    for (sender, receiver, channel), delays in sorted(hops.items()):
        print(f"  {sender:<14} -> {receiver:<14} {channel:<10} {milliseconds(delays)}")


def print_requests(requests: Sequence[RequestTimes], slowest: int) -> None:
    """Sums, and the slowest of all."""
    if not requests:
        return
    print(f"requests: {len(requests)}, preempted {sum(j.admissions > 1 for j in requests)}")
    for name, pick in (
        ("queue", lambda j: j.queue),
        ("first token", lambda j: j.to_first_token),
        ("end", lambda j: j.whole),
        ("longest gap", lambda j: j.longest_gap),
    ):
        print(f"  {name:<12} {milliseconds([v for j in requests if (v := pick(j)) is not None])}")
    ended = [j for j in requests if j.whole is not None]
    ended.sort(key=lambda j: -(j.whole or 0.0))
    if ended[:slowest]:
        print(
            f"  slowest {'':<24}{'queue':>9}{'first':>9}{'end':>9}{'gap':>9} ms  admitted  ended by"
        )
    for j in ended[:slowest]:
        cells = "".join(f"{'-' if v is None else f'{1e3 * v:.1f}':>9}"
                        for v in (j.queue, j.to_first_token, j.whole, j.longest_gap))  # fmt: skip
        print(f"  {j.request_id:<32}{cells}     {j.admissions:>5}    {j.finish}")


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
    """The way of one request: (seconds, stage, row) from its beginning to its last token, in
    order."""

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
    """The timeline of everything that touches begin..end (seconds since the earliest entry), of all
    requests or of one. The recordings are on one clock."""
    ordered = sorted(recordings, key=lambda r: (ORDER.index(r.header.name), r.stage))
    zero = min((r.begin for r in ordered if r.entries), default=0.0)
    drawn = TraceTimeline()
    for recording in ordered:
        spans = list(_spans(recording, zero))
        for row in ROWS:
            mine = [span for span in spans if span.row == row]
            placed = _in_turn(mine) if row == "forward" else _without_overlap(mine)
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
        requests = dict.fromkeys(subjects.of(entry))
        for output in outputs:
            requests |= dict.fromkeys(subjects.of(output))
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


def _without_overlap(spans: list[TimelineSpan]) -> list[TimelineSpan]:
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
            if output.kind == "Plan" and output.counts:
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
    """The flow of a request's visits that are drawn. Two at one moment on one stage are one
    point."""
    points: dict[tuple[float, str, str], None] = {}
    for time, stage, seq in journey.visits:
        if (stage, seq) in inside:
            points[time - zero, stage, "core"] = None
    return Flow(journey.request_id, tuple(points))


TEMPLATE = Path(__file__).with_name("page.html")
DATA_PLACEHOLDER = "/*DATA*/null"
MICRO = 1e6  # microseconds in a second


def html(picture: TraceTimeline) -> str:
    """A page that shows the timeline. Names and details are data, never markup."""
    data = json.dumps(_compact(picture), separators=(",", ":"))
    # "<" could end the script element from within a string.
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
    """Trace events: a process for each stage, a thread for each of its rows, a flow for each
    request."""
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
        f"{options.out}: {counted(len(drawn.spans), 'span')} on {counted(len(drawn.rows), 'row')}, "
        f"{counted(len(drawn.flows), 'request')}, {drawn.seconds:.3f} s"
    )
    return EQUAL

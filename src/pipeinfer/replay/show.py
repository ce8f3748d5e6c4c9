"""`show FILE`: the messages of a trace as a table, all or those of a request, channel or type; and
`stats FILE ...`: counts, bytes and latencies of traces, and where the time of each request went.

Only reads; knows no core.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeinfer.core import LOCAL
from pipeinfer.replay.compare import arrow, line
from pipeinfer.replay.rebuild import Subjects
from pipeinfer.replay.traces import EQUAL, LoadedTrace, TraceEntry, load, load_merged, warn_of_tail

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
    """One request is named, several are counted."""
    if len(ids) == 1:
        return f"{ids[0]}: "
    return f"{len(ids)} requests: " if ids else ""


def chosen(
    entries: list[TraceEntry], options: argparse.Namespace
) -> Iterator[tuple[TraceEntry, tuple[str, ...]]]:
    """The entries that all filters let through, each with the requests it is about."""
    subjects = Subjects()
    begin = entries[0].time if entries else 0.0
    for entry in entries:
        ids = subjects.of(entry.message)
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
    ("tokenizer", "out", "Work"): "tokenized",
    ("scheduler", "in", "Work"): "queued",
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

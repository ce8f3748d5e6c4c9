"""`show FILE`: the messages of a trace as a table, all or those of a request, channel or type.

Only reads; knows no core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pipeinfer.replay.codes import EQUAL
from pipeinfer.replay.compare import arrow, line
from pipeinfer.replay.rebuild import Subjects
from pipeinfer.replay.recording import TraceEntry, load, warn_of_tail

WIDE = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--request", metavar="ID", help="those about this request")
    parser.add_argument("--channel", metavar="C")
    parser.add_argument("--type", metavar="T", help="a message type, such as Plan")
    parser.add_argument("--from", dest="begin", type=float, default=0.0, metavar="S")
    parser.add_argument("--to", dest="end", type=float, default=float("inf"), metavar="S",
                        help="seconds since the trace's first message")  # fmt: skip
    parser.add_argument("--width", type=int, default=WIDE, help="characters of a message shown")


def run(options: argparse.Namespace) -> int:
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

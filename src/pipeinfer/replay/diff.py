"""`diff A B`: where two traces of the same stage first differ, and what each has more of.

Request ids, epochs and incarnations are numbered in the order in which they appear, so that two
runs of the same requests can be compared. Only reads; knows no core.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from pipeinfer.replay.codes import DIFFERENT, EQUAL, USAGE, CannotReplay
from pipeinfer.replay.compare import SHELL_MESSAGES, arrow, first_mismatch, line
from pipeinfer.replay.recording import LoadedTrace, TraceEntry, load, warn_of_tail
from pipeinfer.replay.roles import canonical_changes, rewritten

CLOCKED = frozenset({"Tick"})  # how many there are is the timer's business
BEFORE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--outputs", action="store_true", help="compare only what was sent")


def run(options: argparse.Namespace) -> int:
    """EQUAL or DIFFERENT."""
    a, b = load(options.a), load(options.b)
    if a.header.name != b.header.name:
        raise CannotReplay(USAGE, f"traces of two stages: {a.stage} and {b.stage}")
    for recording in (a, b):
        print(recording.title)
        warn_of_tail(recording)
    ours, theirs = ([*comparable(r, options.outputs)] for r in (a, b))
    print_counts(ours, theirs)
    if not print_first(ours, theirs, a, b):
        print(f"no difference in {len(ours)} messages")
        return EQUAL
    return DIFFERENT


def comparable(recording: LoadedTrace, outputs_only: bool) -> Iterator[TraceEntry]:
    """Inputs and outputs of the core, without what a timer or the shell adds, under plain names."""
    changes = canonical_changes()
    for entry in recording.entries:
        if entry.direction == "note" or entry.kind in SHELL_MESSAGES | CLOCKED:
            continue
        message = rewritten(entry.message, changes)
        if entry.direction == "out" or not outputs_only:
            yield TraceEntry(
                entry.seq, entry.time, entry.direction, entry.channel, entry.peer, entry.number,
                entry.sent, message, entry.size,
            )  # fmt: skip


def print_counts(a: list[TraceEntry], b: list[TraceEntry]) -> None:
    """What the two do not have equally often."""
    ours, theirs = (Counter((e.direction, e.channel, e.kind) for e in side) for side in (a, b))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours[key] != theirs[key]:
            direction, channel, kind = key
            print(f"  {direction:<4} {channel:<9} {kind:<12} {ours[key]:>8} {theirs[key]:>8}")


def print_first(
    a: list[TraceEntry], b: list[TraceEntry], left: LoadedTrace, right: LoadedTrace
) -> bool:
    """Prints the first difference; False if there is none."""
    for at, (one, other) in enumerate(zip_longest(a, b)):
        found = _difference(one, other)
        if found is None:
            continue
        print(f"first difference: {found}")
        for entry in a[max(0, at - BEFORE) : at]:
            print(f"    both {_row(entry, left)}")
        for name, entry, side in (("A", one, left), ("B", other, right)):
            print(f"       {name} {_row(entry, side) if entry is not None else '(ended)'}")
        return True
    return False


def _difference(a: TraceEntry | None, b: TraceEntry | None) -> str | None:
    if a is None or b is None:
        return f"{'A' if a is None else 'B'} ended before"
    for name in ("direction", "channel", "peer", "kind"):
        if getattr(a, name) != getattr(b, name):
            return f"{name}: {getattr(a, name)!r} and {getattr(b, name)!r}"
    mismatch = first_mismatch(a.message, b.message)
    if mismatch is None:
        return None
    return f"{a.kind}.{mismatch.field}: {mismatch.recorded!r} and {mismatch.replayed!r}"


def _row(entry: TraceEntry, recording: LoadedTrace) -> str:
    seconds = entry.time - recording.begin
    return (
        f"{entry.seq:>6} {seconds:>9.4f} {arrow(entry):<17} {entry.kind:<9} {line(entry.message)}"
    )

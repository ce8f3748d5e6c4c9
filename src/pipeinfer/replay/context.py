"""Prints a first difference, and the messages of the same request that came before it.

Knows recordings and differences; nothing of cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from pipeinfer.replay.describe import arrow, line
from pipeinfer.replay.difference import Difference
from pipeinfer.replay.recording import Entry, Recording
from pipeinfer.replay.subjects import Subjects

BEFORE = 8  # messages shown
MOST_REQUESTS = 3  # named; a step may be about hundreds
MOST_TEXT = 300


def explain(recording: Recording, difference: Difference) -> list[str]:
    """Lines for people."""
    cause = difference.cause
    requests, earlier = history(recording.entries, difference)
    lines = [
        f"first difference: message {difference.seq}, {_place(difference)}",
        f"  recorded  {_shown(difference.recorded)}",
        f"  replayed  {_shown(difference.replayed)}",
        f"  came of   message {cause.seq}: {cause.kind} {arrow(cause)}, "
        f"{cause.time - recording.begin:.4f} s into the recording",
    ]
    if requests:
        more = f" and {len(requests) - MOST_REQUESTS} more" * (len(requests) > MOST_REQUESTS)
        lines.append(f"  about     {', '.join(requests[:MOST_REQUESTS])}{more}; before it:")
    else:
        lines.append("  before it:")
    begin = recording.begin
    lines += [
        f"    {entry.seq:>6} {entry.time - begin:>9.4f}  {arrow(entry):<17} {entry.channel:<8} "
        f"{entry.kind:<10} {line(entry.message, 90)}"
        for entry in earlier
    ]
    return lines


def history(
    entries: Sequence[Entry], difference: Difference
) -> tuple[tuple[str, ...], list[Entry]]:
    """(the requests that the difference is about, the last messages about them up to its cause)."""
    subjects = Subjects()
    about = [(entry, subjects.of(entry.message)) for entry in entries
             if entry.seq <= max(difference.seq, difference.cause.seq)]  # fmt: skip
    named = {entry.seq: ids for entry, ids in about}
    requests = _at(difference, entries) or named.get(difference.seq) or ()
    requests = requests or named.get(difference.cause.seq, ())
    wanted = set(requests[:MOST_REQUESTS])
    earlier = deque(
        (entry for entry, ids in about
         if entry.seq <= difference.cause.seq and entry.direction != "note"
         and (not wanted or not wanted.isdisjoint(ids))),
        maxlen=BEFORE,
    )  # fmt: skip
    return requests, list(earlier)


def _at(difference: Difference, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The request of the very row that differs, where the field names one: `rows[3].ids[0]`."""
    entry = next((e for e in entries if e.seq == difference.seq), None)
    head, _, rest = difference.field.partition("[")
    rows = getattr(entry.message, head, None) if entry is not None else None
    number = rest.partition("]")[0]
    if not isinstance(rows, tuple) or not number.isdigit() or int(number) >= len(rows):
        return ()
    name = getattr(rows[int(number)], "request_id", None)
    return (name,) if isinstance(name, str) else ()


def _place(difference: Difference) -> str:
    if not difference.field:
        return f"channel {difference.channel}: a whole message"
    return f"channel {difference.channel}, field {difference.field}"


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"

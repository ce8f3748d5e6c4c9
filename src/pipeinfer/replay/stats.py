"""`stats FILE...`: what is in traces, and how long messages and requests took.

Counts and bytes for each channel and type, the latency of each hop, and for each request the wait
for a slot, the first token and the end. Only reads; knows no core.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pipeinfer.replay.codes import EQUAL
from pipeinfer.replay.journeys import Journey, journeys
from pipeinfer.replay.merging import load_merged
from pipeinfer.replay.quantiles import milliseconds
from pipeinfer.replay.recording import Recording, warn_of_tail

SLOWEST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, metavar="FILE", nargs="+")
    parser.add_argument("--slowest", type=int, default=SLOWEST, metavar="N",
                        help="how many of the slowest requests are listed")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    recordings = load_merged(options.files)
    for recording in recordings:
        print(recording.title)
        print_counts(recording)
        warn_of_tail(recording)
    print_hops(recordings)
    print_requests(list(journeys(recordings).values()), options.slowest)
    return EQUAL


def print_counts(recording: Recording) -> None:
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


def print_hops(recordings: Sequence[Recording]) -> None:
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


def print_requests(requests: Sequence[Journey], slowest: int) -> None:
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

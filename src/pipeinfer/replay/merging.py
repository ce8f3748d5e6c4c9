"""Several traces on one clock: that of the first, after the offsets that they measure themselves.

Knows recordings; what is made of them is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeinfer.replay.clocks import Offset, offsets
from pipeinfer.replay.codes import USAGE, CannotReplay
from pipeinfer.replay.recording import Recording, load


def load_merged(paths: Sequence[Path]) -> list[Recording]:
    """All of them, in the order of the paths. CannotReplay for two traces of one process at once,
    and for what cannot be read."""
    return merged([load(path) for path in paths])


def merged(recordings: Sequence[Recording]) -> list[Recording]:
    """The recordings with their entries' times on the first one's clock."""
    stages = [recording.stage for recording in recordings]
    twice = sorted({stage for stage in stages if stages.count(stage) > 1})
    if twice:
        raise CannotReplay(USAGE, f"two traces of {', '.join(twice)}: merge one life at a time")
    found = zip(recordings, offsets(recordings), strict=True)
    return [_moved(recording, offset) for recording, offset in found]


def _moved(recording: Recording, offset: Offset) -> Recording:
    if not offset.seconds:
        return recording
    entries = [replace(entry, time=entry.time - offset.seconds) for entry in recording.entries]
    return replace(recording, entries=entries, offset=offset.seconds)

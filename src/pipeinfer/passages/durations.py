"""How long a stage takes for a request: medians of the passages that have ended.

Which part of a passage counts is said here for each kind of stage; docs/page.md says it to people.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from pipeinfer.control import Moment, Passage

MINUTE = 60.0
LATEST = 256  # durations of a stage of which the median is taken


def _whole(passage: Passage) -> float | None:
    return passage.ended - passage.began


def _until_admitted(passage: Passage) -> float | None:
    admitted = _moment(passage, "admitted")
    return None if admitted is None else admitted.at - passage.began


def _of_first_text(passage: Passage) -> float | None:
    """A passage lasts as long as its request generates; only this part is the stage's own. The
    stage's clock alone says it: the scheduler's may be that of another host."""
    first = _moment(passage, "first_text")
    return None if first is None else first.values.get("seconds")


def _moment(passage: Passage, name: str) -> Moment | None:
    return next((one for one in passage.moments if one.name == name), None)


PARTS: dict[str, Callable[[Passage], float | None]] = {
    "tokenizer": _whole,
    "scheduler": _until_admitted,
    "detokenizer": _of_first_text,
}


class Durations:
    """Of all stages, over the last minute by `clock` (Unix seconds)."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._latest: dict[str, deque[tuple[float, float]]] = {}

    def note(self, passage: Passage) -> None:
        """Takes any passage; those that go on, and stages of which no part counts, are left."""
        part = PARTS.get(passage.stage.partition("-")[0])
        seconds = part(passage) if part is not None and passage.ended else None
        if seconds is not None:
            latest = self._latest.setdefault(passage.stage, deque(maxlen=LATEST))
            latest.append((passage.ended, seconds))

    def median(self, stage: str) -> float | None:
        """Seconds; None where the last minute has none."""
        oldest = self._clock() - MINUTE
        lately = [seconds for at, seconds in self._latest.get(stage, ()) if at >= oldest]
        return statistics.median(lately) if lately else None

    def clear(self) -> None:
        """Forgets all."""
        self._latest.clear()

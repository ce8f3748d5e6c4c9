"""The flight recorder's memory: the last minute of a stage, in segments that each can be replayed.

A segment begins with a fresh core or a snapshot. Knows blocks and no messages; the recorder's
thread writes, other threads only read the numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from pipeinfer.trace import format as form
from pipeinfer.trace.format import TraceHeader

MINUTE = 60.0  # seconds that must be there, if they fit
SEGMENT = 30.0  # seconds after which a new segment begins
PARTS = 8  # of the budget: the largest share of a segment
KEPT = 0.75  # of the budget, of a segment that lost its beginning


@dataclass
class _Segment:
    """`header`: of the file that would begin here, without its snapshot, which lies packed. broken:
    its beginning did not fit, and with it the state."""

    header: TraceHeader
    snapshot: bytes | None
    begun: float
    blocks: deque[bytes] = field(default_factory=deque[bytes])
    bytes: int = 0
    broken: bool = False

    @property
    def blocks_bytes(self) -> int:
        """Without its snapshot."""
        return self.bytes - len(self.snapshot or b"")


class Ring:
    """At most `budget` bytes; of those, segments that are needed for the last minute.

    keep_all: older ones stay too while they fit. An engine's memory can be computed again only from
    the beginning of its epoch, and no state is taken of it while it is busy: what does not fit is
    then missing at the beginning, and what is left cannot be replayed.
    """

    def __init__(self, budget: int, keep_all: bool = False) -> None:
        self._budget = budget
        self._keep_all = keep_all
        self._segments: deque[_Segment] = deque()
        self.bytes = 0

    def begin(self, header: TraceHeader, now: float, packed: bytes | None = None) -> None:
        """A new segment: from a state, `packed` by zstd, or without one from a fresh core."""
        size = len(packed or b"")
        while self._segments and self._segments[0].broken:
            self.bytes -= self._segments.popleft().bytes
        self._segments.append(_Segment(header, packed, now, bytes=size))
        self.bytes += size
        self._shrink(now)

    def add(self, block: bytes, now: float) -> None:
        """A block of records of the current segment."""
        if not self._segments:
            return
        segment = self._segments[-1]
        segment.blocks.append(block)
        segment.bytes += len(block)
        self.bytes += len(block)
        self._shrink(now)

    def latest_header(self) -> TraceHeader | None:
        """The current segment's, without a snapshot; None if there is no segment."""
        return self._segments[-1].header if self._segments else None

    def clear(self) -> None:
        """Forgets everything; what is added before the next `begin` is left out."""
        self._segments.clear()
        self.bytes = 0

    def wants_segment(self, now: float, undisturbed: bool = False) -> bool:
        """Whether a new segment should begin: the current one is long, or there is none.

        One that is old and has less in it than a state takes goes on: of a stage that does nothing
        no state is taken, again and again. undisturbed: taking one holds up nobody; where all is
        kept, that is waited for.
        """
        try:
            current = self._segments[-1]
        except IndexError:
            return True
        if self._keep_all:
            return undisturbed and (current.broken or current.bytes >= self._budget // PARTS)
        aged = now - current.begun >= SEGMENT and current.blocks_bytes >= current.bytes / 2
        return aged or current.bytes >= self._budget // PARTS

    def file(self, error: str) -> list[bytes]:
        """The parts of a trace file with all that is kept; empty if there is nothing."""
        if not self._segments:
            return []
        first = self._segments[0]
        snapshot = None
        if first.snapshot is not None:
            snapshot = form.unpack_state(first.snapshot)
        header = msgspec.structs.replace(
            first.header, snapshot=snapshot, error=error, broken=first.broken
        )
        blocks = [block for segment in self._segments for block in segment.blocks]
        return [form.pack_header(header), *blocks]

    def _shrink(self, now: float) -> None:
        while len(self._segments) > 1:
            old = not self._keep_all and now - self._segments[1].begun >= MINUTE
            if not old and self.bytes <= self._budget:
                return
            self.bytes -= self._segments.popleft().bytes
        if self._keep_all and self.bytes > self._budget:
            self._break(self._segments[0])

    def _break(self, only: _Segment) -> None:
        """Leaves out the beginning of the segment, as little as makes room for a while."""
        only.broken, only.snapshot = True, None
        only.bytes = sum(map(len, only.blocks))
        while only.blocks and only.bytes > KEPT * self._budget:
            only.bytes -= len(only.blocks.popleft())
        self.bytes = only.bytes

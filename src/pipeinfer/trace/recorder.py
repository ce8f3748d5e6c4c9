"""Collects what a stage takes and gives, and has a thread pack it into recordings and the ring.

The stage's loop only appends rows to a list. Knows no stage: whoever owns it says when a piece of
the list is whole, what header a file gets and what the core's state is.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from pipeinfer.trace import format as form
from pipeinfer.trace.file import FLIGHT, TraceFile, prune
from pipeinfer.trace.format import ModelIdentity, Row, TraceHeader
from pipeinfer.trace.recording import Recording
from pipeinfer.trace.ring import Ring
from pipeinfer.trace.snapshot import Unsnapshottable
from pipeinfer.trace.state_copy import Copied, StateLost

log = logging.getLogger(__name__)

MOST_WAITING = 64 << 20  # bytes that may wait for the thread before recording gives up
ROW_BYTES = 150  # of a row beside its body, about
AGAIN = 10.0  # seconds after which a state that could not be taken is asked for again
JOIN = 10.0  # seconds that the thread has to write what is left
BEGIN = b"\xa5Begin"  # as an encoded message begins, behind the array's first byte


class Recorder:
    """Rows in, files out.

    add: takes a row; the hot path, on the stage's loop, as all else here but the thread's own part.
    identify: names the checkpoint; called once, in the thread. restarts: a `Begin` makes the core
    as good as new, so a segment of the ring begins there without a snapshot.
    """

    def __init__(
        self,
        stem: str,
        identify: Callable[[], ModelIdentity],
        ring: Ring | None = None,
        restarts: bool = False,
    ) -> None:
        self._stem = stem
        self._identify = identify
        self._restarts = restarts
        self._model: ModelIdentity | None = None
        self._rows: list[Row] = []
        self.add = self._rows.append
        self.ring = ring
        self.lost = 0  # rows that were dropped because the thread could not keep up
        self._behind = False
        self._asked = False  # a segment was sent to the ring and has not arrived
        self._not_before = 0.0  # when a segment may be begun again
        self._closing = threading.Event()
        self._given = self._done = 0  # bytes handed to the thread, and worked off by it
        self._recordings: list[Recording] = []
        self._packer = form.Packer()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"record {stem}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- on the loop

    @property
    def recording(self) -> int:
        """Recordings that run."""
        return len(self._recordings)

    @property
    def waiting(self) -> int:
        """Rows that no `flush` has taken yet."""
        return len(self._rows)

    def flush(self, now: float) -> None:
        """Hands over the rows so far: whole events, so never while the core handles one."""
        if not self._rows:
            return
        chunk = self._rows.copy()
        self._rows.clear()
        size = sum([len(row[6]) for row in chunk]) + ROW_BYTES * len(chunk)
        if self._given + size - self._done > MOST_WAITING:
            self._drop(len(chunk))
            return
        if self._behind:
            self._behind = False
            log.warning("recording again after %d lost messages", self.lost)
        self._given += size
        self._work.put(partial(self._take, chunk, size, now))

    def gap(self, reason: str) -> None:
        """An input is missing from here on, and what comes after it cannot be replayed; flush
        before. Recordings end; the ring begins again with its next segment."""
        log.error("recordings end: %s", reason)
        self._work.put(partial(self._break_off, reason, 1))

    def wants_segment(self, now: float, undisturbed: bool = False) -> bool:
        """Whether the ring should be given a new beginning now, right after a flush. undisturbed:
        see ring.py."""
        ring = self.ring
        if ring is None or self._asked or self._behind or now < self._not_before:
            return False
        return ring.wants_segment(now, undisturbed)

    def postpone_segment(self, now: float, reason: str) -> None:
        """There is no state to begin with: the ring's current segment goes on."""
        log.warning("the flight recorder goes on with an older state: %s", reason)
        self._not_before = now + AGAIN

    def begin_segment(self, header: TraceHeader, now: float, state: Copied | None = None) -> None:
        """The ring's next segment begins here, with `state`, taken just now, or a fresh core."""
        self._asked = True
        self._work.put(partial(self._begin_segment, header, now, state))

    def start(self, recording: Recording, header: TraceHeader, state: Copied | None = None) -> None:
        """`recording` gets what is added from now on; flush before. `state`: as above."""
        self._work.put(partial(self._start, recording, header, state))

    def stop(self, name: str, reason: str) -> None:
        """Ends the recording called `name`, if it runs; flush before."""
        self._work.put(partial(self._stop, name, reason))

    def dump(self, folders: list[Path], error: str) -> None:
        """Writes the ring into the first of `folders` that takes it; flush before."""
        self._work.put(partial(self._dump, folders, error))

    def close(self, reason: str) -> None:
        """Ends all recordings and waits until everything is written; flush before."""
        self._closing.set()  # a state that is still on its way is of no use any more
        self._work.put(partial(self._end_all, reason))
        self._work.put(None)
        self._thread.join(JOIN)
        if self._thread.is_alive():
            log.error("recordings were not written to their end within %g s", JOIN)

    def _drop(self, rows: int) -> None:
        self.lost += rows
        if not self._behind:
            self._behind = True
            log.error("recording stops: %d MiB wait to be written", MOST_WAITING >> 20)
        self._work.put(partial(self._break_off, "the disk did not keep up", self.lost))

    # ----------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # recording must not take the stage down, but neither fail unseen
                log.exception("recording failed")
                self._end_all("recording failed; the stage's log says why")

    def _take(self, chunk: list[Row], size: int, now: float) -> None:
        for rows in self._pieces(chunk):
            if self._restarts and self.ring is not None and _restarts(rows[0]):
                self._restart_segment(now)
            plain = self.ring is not None or len(self._recordings) > 1
            block = self._packer.pack(rows) if plain else None
            if self.ring is not None and block is not None:
                self.ring.add(block, now)
            for recording in self._recordings:
                recording.take(rows, block)
        self._forget_ended()
        self._done += size

    def _pieces(self, chunk: list[Row]) -> list[list[Row]]:
        """The chunk, cut before each Begin if that restarts the core."""
        if not self._restarts or self.ring is None:
            return [chunk]
        cuts = [0, *(at for at, row in enumerate(chunk) if at and _restarts(row)), len(chunk)]
        return [chunk[a:b] for a, b in itertools.pairwise(cuts)]

    def _restart_segment(self, now: float) -> None:
        assert self.ring is not None
        header = self.ring.latest_header()
        if header is not None:
            wall = header.wall + now - header.monotonic
            self.ring.begin(msgspec.structs.replace(header, wall=wall, monotonic=now), now)

    def _begin_segment(self, header: TraceHeader, now: float, state: Copied | None) -> None:
        try:
            packed = None if state is None else state.packed(self._closing.is_set)
            if self.ring is not None:
                self.ring.begin(self._named(header), now, packed)
        except StateLost as error:
            if not self._closing.is_set():
                self.postpone_segment(now, str(error))
        except Unsnapshottable as error:
            log.error("no flight recorder from now on: %s", error)
            self.ring = None
        finally:
            self._asked = False

    def _start(self, recording: Recording, header: TraceHeader, state: Copied | None) -> None:
        try:
            if state is not None:
                snapshot = form.unpack_state(state.packed(self._closing.is_set))
                header = msgspec.structs.replace(header, snapshot=snapshot)
        except (StateLost, Unsnapshottable) as error:
            recording.fail(str(error))
            return
        recording.begin(self._stem, self._named(header))
        if not recording.ended:
            self._recordings.append(recording)

    def _stop(self, name: str, reason: str) -> None:
        for recording in self._recordings:
            if recording.name == name:
                recording.end(reason)
        self._forget_ended()

    def _end_all(self, reason: str) -> None:
        for recording in self._recordings:
            recording.end(reason)
        self._forget_ended()

    def _break_off(self, reason: str, lost: int) -> None:
        """Rows are missing: what comes after a gap could not be replayed."""
        for recording in self._recordings:
            recording.end(reason, lost)
        self._forget_ended()
        if self.ring is not None:
            self.ring.clear()

    def _forget_ended(self) -> None:
        self._recordings = [one for one in self._recordings if not one.ended]

    def _dump(self, folders: list[Path], error: str) -> None:
        parts = self.ring.file(error) if self.ring is not None else []
        for folder in folders if parts else ():
            try:
                file = TraceFile(folder, FLIGHT + self._stem)
                for part in parts:
                    file.write(part)
                file.close()
            except OSError as reason:
                log.error("no flight recording in %s: %s", folder, reason.strerror)
                continue
            log.error("the flight recording is in %s", file.path)
            with contextlib.suppress(OSError):  # another stage may prune there as well
                prune(folder)
            return

    def _named(self, header: TraceHeader) -> TraceHeader:
        if self._model is None:
            self._model = self._identify()
        return msgspec.structs.replace(header, model=self._model)


def _restarts(row: Row) -> bool:
    return row[1] == "in" and row[2] == "plan" and row[6].startswith(BEGIN, 1)

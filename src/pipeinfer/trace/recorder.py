"""Collects what a stage takes and gives, and has a thread pack it into recordings and the flight
ring.

- `Recorder`: the stage's loop only appends rows to a list; the owner says when a piece of the list
  is whole, which header a file gets and what the core's state is
- `FlightRing`: the last minute, in memory
- `Recording`: a trace file that takes blocks of records until `end` or a limit;
  used by the recorder's thread alone. Files are for their owner alone (0600), because prompts stand
  in them

Knows no stage.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from pipeinfer.core import LOCAL
from pipeinfer.gguf.header import is_gguf
from pipeinfer.messages import BeginEpoch
from pipeinfer.trace import format as form
from pipeinfer.trace.format import End, ModelIdentity, Row, TraceHeader
from pipeinfer.trace.snapshot import StateCopy, StateCopyFailed, Unsnapshottable

log = logging.getLogger(__name__)

MINUTE = 60.0  # seconds that must be there, if they fit
SEGMENT = 30.0  # seconds after which a new segment begins
PARTS = 8  # of the budget: the largest share of a segment
TRUNCATED_SEGMENT_SHARE = 0.75  # of the budget, of a segment that lost its beginning


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
        """Bytes of the segment's blocks, without its snapshot."""
        return self.bytes - len(self.snapshot or b"")


class FlightRing:
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

    def needs_segment(self, now: float, undisturbed: bool = False) -> bool:
        """Whether a new segment should begin: the current one is long, or there is none.

        An old segment with fewer bytes than a state takes goes on, so that no state is taken again
        and again of a stage that does nothing. undisturbed: taking a state delays nothing; if all
        is kept, a new segment waits for that.
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
        while only.blocks and only.bytes > TRUNCATED_SEGMENT_SHARE * self._budget:
            only.bytes -= len(only.blocks.popleft())
        self.bytes = only.bytes


MAX_WAITING_BYTES = 64 << 20  # bytes that may wait for the thread before recording gives up
ROW_OVERHEAD_BYTES = 150  # of a row beside its body, about
STATE_RETRY_SECONDS = 10.0  # seconds after which a state that could not be taken is asked for again
CLOSE_TIMEOUT = 10.0  # seconds that the thread has to write what is left
# How an encoded BeginEpoch begins, behind the array's first byte.
BEGIN_EPOCH_PREFIX = msgspec.msgpack.encode(BeginEpoch.__name__)


class Recorder:
    """Rows in, files out.

    Attributes:
    - add: takes a row; the hot path, on the stage's loop, as all else here but the thread's own
      part
    - identify: names the checkpoint; called once, in the thread
    - restarts: a `BeginEpoch` makes the core as good as new, so a segment of the ring begins there
      without a snapshot
    """

    def __init__(
        self,
        stem: str,
        identify: Callable[[], ModelIdentity],
        ring: FlightRing | None = None,
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
        self._lagging = False
        self._segment_requested = False  # a segment was sent to the ring and has not arrived
        self._not_before = 0.0  # when a segment may be begun again
        self._closing = threading.Event()
        self._given = self._done = 0  # bytes handed to the thread, and worked off by it
        self._recordings: list[Recording] = []
        self._packer = form.RecordPacker()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"record {stem}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- on the loop

    @property
    def recording(self) -> int:
        """Number of recordings that run."""
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
        size = sum([len(row[6]) for row in chunk]) + ROW_OVERHEAD_BYTES * len(chunk)
        if self._given + size - self._done > MAX_WAITING_BYTES:
            self._drop(len(chunk))
            return
        if self._lagging:
            self._lagging = False
            log.warning("recording again after %d lost messages", self.lost)
        self._given += size
        self._work.put(partial(self._take, chunk, size, now))

    def gap(self, reason: str) -> None:
        """An input is missing from here on, and what comes after it cannot be replayed; flush
        before. Recordings end; the ring begins again with its next segment."""
        log.error("recordings end: %s", reason)
        self._work.put(partial(self._break_off, reason, 1))

    def needs_segment(self, now: float, undisturbed: bool = False) -> bool:
        """Whether the ring should be given a new beginning now, right after a flush. undisturbed:
        see ring.py."""
        ring = self.ring
        if ring is None or self._segment_requested or self._lagging or now < self._not_before:
            return False
        return ring.needs_segment(now, undisturbed)

    def postpone_segment(self, now: float, reason: str) -> None:
        """There is no state to begin with: the ring's current segment goes on."""
        log.warning("the flight recorder goes on with an older state: %s", reason)
        self._not_before = now + STATE_RETRY_SECONDS

    def begin_segment(
        self, header: TraceHeader, now: float, state: StateCopy | None = None
    ) -> None:
        """The ring's next segment begins here, with `state`, taken just now, or a fresh core."""
        self._segment_requested = True
        self._work.put(partial(self._begin_segment, header, now, state))

    def start(
        self, recording: Recording, header: TraceHeader, state: StateCopy | None = None
    ) -> None:
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
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            log.error("recordings were not written to their end within %g s", CLOSE_TIMEOUT)

    def _drop(self, rows: int) -> None:
        self.lost += rows
        if not self._lagging:
            self._lagging = True
            log.error("recording stops: %d MiB wait to be written", MAX_WAITING_BYTES >> 20)
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
        for rows in self._split(chunk):
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

    def _split(self, chunk: list[Row]) -> list[list[Row]]:
        """The chunk, cut before each BeginEpoch if that restarts the core."""
        if not self._restarts or self.ring is None:
            return [chunk]
        bounds = [0, *(at for at, row in enumerate(chunk) if at and _restarts(row)), len(chunk)]
        return [chunk[a:b] for a, b in itertools.pairwise(bounds)]

    def _restart_segment(self, now: float) -> None:
        assert self.ring is not None
        header = self.ring.latest_header()
        if header is not None:
            wall = header.wall + now - header.monotonic
            self.ring.begin(msgspec.structs.replace(header, wall=wall, monotonic=now), now)

    def _begin_segment(self, header: TraceHeader, now: float, state: StateCopy | None) -> None:
        try:
            packed = None if state is None else state.packed(self._closing.is_set)
            if self.ring is not None:
                self.ring.begin(self._named(header), now, packed)
        except StateCopyFailed as error:
            if not self._closing.is_set():
                self.postpone_segment(now, str(error))
        except Unsnapshottable as error:
            log.error("no flight recorder from now on: %s", error)
            self.ring = None
        finally:
            self._segment_requested = False

    def _start(self, recording: Recording, header: TraceHeader, state: StateCopy | None) -> None:
        try:
            if state is not None:
                snapshot = form.unpack_state(state.packed(self._closing.is_set))
                header = msgspec.structs.replace(header, snapshot=snapshot)
        except (StateCopyFailed, Unsnapshottable) as error:
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
                file = TraceFile(folder, FLIGHT_PREFIX + self._stem)
                for part in parts:
                    file.write(part)
                file.close()
            except OSError as reason:
                log.error("no flight recording in %s: %s", folder, reason.strerror)
                continue
            log.error("the flight recording is in %s", file.path)
            with contextlib.suppress(OSError):  # another stage may prune there as well
                prune_flight_recordings(folder)
            return

    def _named(self, header: TraceHeader) -> TraceHeader:
        if self._model is None:
            self._model = self._identify()
        return msgspec.structs.replace(header, model=self._model)


def _restarts(row: Row) -> bool:
    return row[1] == "in" and row[2] == "plan" and row[6].startswith(BEGIN_EPOCH_PREFIX, 1)


SUFFIX = ".pitrace"
FLIGHT_PREFIX = "flight-"
# Flight recordings in a folder; a stage that dies again and again must not fill the disk.
MAX_FLIGHT_RECORDINGS = 32


class TraceFile:
    """A new file `DIR/STEM.pitrace`, or `STEM-2`, `STEM-3` ... where there is one already."""

    def __init__(self, folder: str | Path, stem: str) -> None:
        """Creates the folder and the file. Raises OSError."""
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.bytes = 0
        number = 1
        while True:
            self.path = folder / (stem + (f"-{number}" if number > 1 else "") + SUFFIX)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o600)
                return
            except FileExistsError:
                number += 1

    def write(self, block: bytes) -> None:
        """Hands the block to the kernel, where it survives this process. Raises OSError."""
        unwritten = memoryview(block)
        while unwritten:
            unwritten = unwritten[os.write(self._descriptor, unwritten) :]
        self.bytes += len(block)

    def close(self) -> None:
        os.close(self._descriptor)


def default_folder() -> Path:
    """The folder of flight recordings without --flight-dir: XDG's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pipeinfer"


def prune_flight_recordings(folder: Path) -> None:
    """Removes the oldest flight recordings of `folder` beyond KEPT. Raises OSError."""
    found = sorted(folder.glob(f"{FLIGHT_PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    for path in found[:-MAX_FLIGHT_RECORDINGS]:
        path.unlink(missing_ok=True)


MAX_SAFETENSORS_HEADER = 100 << 20  # bytes; what safetensors itself allows
MAX_GGUF_HEADER = 16 << 20  # bytes; with it a large vocabulary


def identify_model(name: str, folder: str) -> ModelIdentity:
    """The identity of the checkpoint in `folder`; digest "" if it has no readable config.json.

    `folder` may be a GGUF file."""
    try:
        return ModelIdentity(name, folder, _digest(Path(folder)))
    except OSError:
        return ModelIdentity(name, folder)  # the stages that need the files say what is wrong


def _digest(folder: Path) -> str:
    if is_gguf(folder):
        return _header_digest(folder)
    total = sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        total.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            size = (
                min(struct.unpack("<Q", prefix)[0], MAX_SAFETENSORS_HEADER)
                if len(prefix) == 8
                else 0
            )
            total.update(file.read(size))
    return total.hexdigest()


def _header_digest(file: Path) -> str:
    """A digest of a GGUF file's size and first bytes: key-values, vocabulary and the list of
    tensors."""
    total = sha256(f"{file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        total.update(stream.read(MAX_GGUF_HEADER))
    return total.hexdigest()


END_BYTES = 256  # kept free for the last note, so that a limit in bytes holds


class Rewriter(Protocol):
    """Makes other rows, and another header, of those that were recorded."""

    def row(self, row: Row) -> Row: ...

    def header(self, header: TraceHeader) -> TraceHeader: ...


@dataclass(frozen=True)
class Quota:
    """The limits after which a recording ends by itself; 0 is without limit."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """The state of a recording.

    Attributes:
    - name: of the recording
    - path: of its file
    - records, bytes: written so far
    - reason: why it ended or failed, "" while it goes on
    """

    name: str
    state: Literal["recording", "done", "failed"]
    path: str
    records: int
    bytes: int
    reason: str = ""


class Recording:
    """Records into `folder` until a limit, `end`, or an error of the disk.

    rewriter: makes what rewrites the rows (redaction), when it is needed first; ValueError if it
    cannot. on_change: called at the beginning and at the end, on the calling thread.
    """

    def __init__(
        self,
        name: str,
        folder: str | Path,
        quota: Quota,
        on_change: Callable[[Outcome], None],
        rewriter: Callable[[], Rewriter] | None = None,
    ) -> None:
        self.name = name
        self.ended = False
        self._folder = folder
        self._quota = quota
        self._make_rewriter = rewriter
        self._rewriter: Rewriter | None = None
        self._on_change = on_change
        self._file: TraceFile | None = None
        self._packer = form.RecordPacker()
        self._records = 0

    def begin(self, stem: str, header: TraceHeader) -> None:
        """Creates the file `stem`.pitrace with its header."""
        try:
            if self._make_rewriter is not None:
                self._rewriter = self._make_rewriter()
                header = self._rewriter.header(header)
            block = form.pack_header(header)
            if self._quota.bytes and len(block) + END_BYTES > self._quota.bytes:
                self._settle("failed", f"its beginning alone takes {len(block)} bytes")
                return
            self._file = TraceFile(self._folder, stem)
            self._file.write(block)
        except OSError as error:
            self._settle("failed", f"{self._folder}: {error.strerror}")
            return
        except ValueError as error:  # a configuration, a key or a state that cannot be rewritten
            self._settle("failed", str(error))
            return
        log.info("recording into %s", self._file.path)
        self._on_change(self._outcome("recording"))

    def fail(self, reason: str) -> None:
        """Ends the recording as failed: it cannot begin."""
        self._settle("failed", reason)

    def take(self, rows: Sequence[Row], block: bytes | None) -> None:
        """The next rows, whole events; `block` has them packed already, None: pack them here."""
        if self.ended:
            return
        num_left = self._quota.messages - self._records if self._quota.messages else len(rows)
        full = bool(self._quota.messages) and num_left <= len(rows)
        if full:
            rows = rows[: _end_of_event(rows, num_left)]
        if full or self._rewriter is not None or block is None:
            if self._rewriter is not None:
                rows = [self._rewriter.row(row) for row in rows]
            block = self._packer.pack(rows)
        self._write(block, len(rows))
        if full:
            self.end("as many messages as were asked for")

    def end(self, reason: str, lost: int = 0) -> None:
        """Ends in good order, with a note. Does nothing when it has ended already."""
        if self.ended or self._file is None:
            return
        try:
            body = msgspec.msgpack.encode(End(reason, lost))
            self._file.write(form.pack_records([(0.0, "note", LOCAL, "", 0, 0.0, body)]))
        except OSError as error:
            self._settle("failed", str(error))
            return
        self._settle("done", reason)

    def _write(self, block: bytes, records: int) -> None:
        assert self._file is not None
        max_bytes = self._quota.bytes
        if max_bytes and self._file.bytes + len(block) + END_BYTES > max_bytes:
            self.end("as many bytes as were asked for")
            return
        try:
            self._file.write(block)
        except OSError as error:
            self._settle("failed", str(error))
            return
        self._records += records

    def _settle(self, state: Literal["done", "failed"], reason: str) -> None:
        self.ended = True
        outcome = self._outcome(state, reason)
        if self._file is not None:
            self._file.close()
        level = logging.INFO if state == "done" else logging.ERROR
        log.log(level, "recording %s: %s", outcome.path or self._folder, reason)
        self._on_change(outcome)

    def _outcome(self, state: Literal["recording", "done", "failed"], reason: str = "") -> Outcome:
        file = self._file
        path, size = (str(file.path), file.bytes) if file is not None else ("", 0)
        return Outcome(self.name, state, path, self._records, size, reason)


def _end_of_event(rows: Sequence[Row], count: int) -> int:
    """At least `count` rows, and all outputs of the last input among them."""
    for at in range(count, len(rows)):
        if rows[at][1] == "in":
            return at
    return len(rows)

"""Answers that outlive connections: streams in memory, and finished responses in a file.

- ResumableStream: the events of one answer, from the first that is retained to the last.
- StreamReader: how far one connection has come in a stream.
- ResumableStreams: all streams of a gateway. They are dropped when their time is over, and when
  they occupy too many bytes.
- ResponseStore: the file of `--store`, which outlives all processes.

Events belong to partitions: each choice of an answer is one, and what comes behind all choices
another. An event is known by how many events of each partition there were with it. Within a
partition that is the same however often the answer is written; between partitions the order is that
of arrival, which another gateway need not repeat. So a client that names the last event that it has
gets all others, each once, from any connection and from any gateway.

One thread owns the SQLite connection of the file. It takes all work that waits into one
transaction, so that many responses that end together cost one write to the disk; a response
that is reported as stored survives the death of every process, and of the machine.

Knows no HTTP, and nothing about what an event or a response says. Streams know no clock.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple, TypeVar

from pipeinfer.core import RecentTable
from pipeinfer.settings import ConfigurationError

STREAM_BYTES = 1024  # bytes that a stream occupies beside its events
EVENT_BYTES = 48  # bytes that an event occupies beside its text
MAX_READERS = 16  # connections that read one stream; one more takes the place of the oldest
NUMBERS = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15}){0,64}")
GONE_SECONDS = 3600.0  # seconds for which it is remembered that a stream was dropped
MAX_GONE = 10_000  # dropped streams that are remembered


class StreamUnknown(LookupError):
    """No such stream is kept, or it belongs to another key."""


class StreamGone(LookupError):
    """The stream was kept, and is not any more, or not from the wanted event on."""


class StreamsFull(Exception):
    """No room for another stream, because the streams that are there cannot be dropped."""


class RetentionPolicy(NamedTuple):
    """How long a stream lives without a connection.

    detached: it is computed to its end without one. seconds: for which it is kept; of a detached
    stream they count from its end at the earliest.
    """

    detached: bool
    seconds: float


class RetentionBounds(NamedTuple):
    """Bytes of all streams together, and of those of one owner."""

    total: int
    per_owner: int


MAX_PARTITIONS = 65  # of a stream: each event's id names one number for each


def parse_event_id(text: str) -> tuple[int, ...] | None:
    """The numbers of events that an event's id names; None for what is no such id."""
    if NUMBERS.fullmatch(text) is None:
        return None
    return tuple(map(int, text.split(".")))


class StreamReader:
    """A connection that reads a stream.

    Attributes:
    - position: number of the next event of all partitions that it looks at
    - passed: events of each partition before that
    - received: events of each partition that the client has
    - on_change(): called when there is more to read, and at the end
    - lost: the stream was dropped, or the event at `position`, or another connection took this
      one's place
    """

    __slots__ = ("lost", "on_change", "passed", "position", "received")

    def __init__(
        self,
        position: int,
        passed: Sequence[int],
        received: Sequence[int],
        on_change: Callable[[], None],
    ) -> None:
        self.position = position
        self.passed = list(passed)
        self.received = list(received)
        self.on_change = on_change
        self.lost = False


class ResumableStream:
    """The events of one answer.

    Attributes:
    - counts: events of each partition, those that were dropped for their bytes included
    - dropped: of these the latter
    - first: the sum of `dropped`
    - rewritten: another gateway has begun the stream; events may be missing that clients have
      received
    - ended: no more events come
    - delivered: a client receives all of them, even if this process is killed
    - bytes: that it occupies
    - fixed: those of them that are not of events
    - deadline: seconds at which it is dropped, infinite while it has a reader or need not have one
    """

    __slots__ = (
        "_events",
        "_partitions",
        "bytes",
        "counts",
        "deadline",
        "delivered",
        "dropped",
        "ended",
        "fixed",
        "name",
        "owner",
        "policy",
        "readers",
        "rewritten",
    )

    def __init__(
        self, name: str, owner: str, policy: RetentionPolicy, size: int, partitions: int = 1
    ) -> None:
        self.name = name
        self.owner = owner
        self.policy = policy
        self._events: list[bytes] = []
        self._partitions = bytearray()  # of each event
        self.counts = [0] * partitions
        self.dropped = [0] * partitions
        self.rewritten = False
        self.ended = self.delivered = False
        self.bytes = self.fixed = STREAM_BYTES + size
        self.deadline = inf
        self.readers: list[StreamReader] = []

    @property
    def first(self) -> int:
        """Number of the first event that is kept."""
        return sum(self.dropped)

    @property
    def next(self) -> int:
        """Number of the event that comes next."""
        return self.first + len(self._events)

    @property
    def last_event(self) -> bytes:
        """The latest event, empty if there is none."""
        return self._events[-1] if self._events else b""

    def take(self, reader: StreamReader, max_bytes: int) -> list[tuple[str, bytes]]:
        """The reader's next events, each behind its id: about `max_bytes`, at least one if there is
        any. The reader has taken them then. With one partition an id is the event's number;
        with several it says how many of each partition the reader has with this event."""
        size, taken, received, passed = 0, list[tuple[str, bytes]](), reader.received, reader.passed
        if reader.lost:
            return taken
        for at in range(reader.position - self.first, len(self._events)):
            if size >= max_bytes:
                break
            partition, event = self._partitions[at], self._events[at]
            reader.position += 1
            passed[partition] += 1
            if passed[partition] <= received[partition]:
                continue  # its client has it
            received[partition] = passed[partition]
            single = len(received) == 1
            taken.append((str(received[0] - 1) if single else ".".join(map(str, received)), event))
            size += len(event)
        return taken

    def finished(self, reader: StreamReader) -> bool:
        """Whether the reader has taken the whole stream."""
        return self.ended and reader.position == self.next

    def add(self, events: Sequence[bytes], partition: int = 0) -> int:
        """Appends events; returns the bytes that they occupy."""
        self._events += events
        self._partitions += bytes([partition]) * len(events)
        self.counts[partition] += len(events)
        size = sum(map(len, events)) + EVENT_BYTES * len(events)
        self.bytes += size
        return size

    def drop_older_half(self) -> int:
        """Drops the first events, with half of all bytes; returns the bytes that they occupied."""
        freed, count, half = 0, 0, (self.bytes - self.fixed) / 2
        while count < len(self._events) and freed < half:
            freed += len(self._events[count]) + EVENT_BYTES
            self.dropped[self._partitions[count]] += 1
            count += 1
        del self._events[:count], self._partitions[:count]
        self.bytes -= freed
        return freed


class _OwnedStreams:
    """The streams of one owner, oldest first, and their bytes."""

    __slots__ = ("bytes", "delivered", "ended", "running")

    def __init__(self) -> None:
        self.bytes = 0
        self.running: dict[str, ResumableStream] = {}
        # Those of which perhaps nobody has received the last event.
        self.ended: dict[str, ResumableStream] = {}
        self.delivered: dict[str, ResumableStream] = {}

    def place(self, stream: ResumableStream) -> None:
        """Puts the stream where it belongs."""
        self.remove(stream)
        where = self.running if not stream.ended else self.ended
        (self.delivered if stream.delivered else where)[stream.name] = stream

    def remove(self, stream: ResumableStream) -> None:
        for where in (self.running, self.ended, self.delivered):
            where.pop(stream.name, None)

    @property
    def empty(self) -> bool:
        return not (self.running or self.ended or self.delivered)


class ResumableStreams:
    """All resumable streams, by name.

    Over a bound the oldest streams that ended go first, of these the delivered ones. If none has
    ended, the longest loses its older half: a reader at its end goes on, and it can be resumed
    behind what it lost.

    Attributes:
    - on_drop(name): called for each stream that is kept no longer, for whatever reason
    - dropped: streams that went, or lost events, for their bytes
    - resumed: reads that began later
    """

    def __init__(self, bounds: RetentionBounds, on_drop: Callable[[str], None]) -> None:
        self._bounds = bounds
        self._on_drop = on_drop
        self._streams: dict[str, ResumableStream] = {}
        self._owners: dict[str, _OwnedStreams] = {}
        self._gone: RecentTable[str] = RecentTable(GONE_SECONDS, MAX_GONE)
        self.bytes = self.dropped = self.resumed = 0

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_detached(self) -> int:
        """Streams that run on though no connection reads them."""
        return sum(not s.ended and not s.readers for s in self._streams.values())

    def open(
        self,
        name: str,
        owner: str,
        policy: RetentionPolicy,
        size: int,
        now: float,
        partitions: int = 1,
    ) -> ResumableStream:
        """A new stream without events, with `size` bytes beside them. Its time without a reader
        begins. Raises ValueError for a name in use, StreamsFull."""
        if name in self._streams:
            raise ValueError(f"a stream {name!r} is kept already")
        stream = self._streams[name] = ResumableStream(name, owner, policy, size, partitions)
        owned = self._owners.setdefault(owner, _OwnedStreams())
        owned.place(stream)
        self._set_deadline(stream, now)
        self._grow(stream, stream.bytes, now)
        if owned.bytes > self._bounds.per_owner or self.bytes > self._bounds.total:
            self._remove(stream)
            raise StreamsFull
        return stream

    def append(
        self, stream: ResumableStream, events: Sequence[bytes], now: float, partition: int = 0
    ) -> None:
        """Adds events to a stream and wakes its readers. Events of a stream that is no longer kept
        are dropped."""
        if self._has(stream) and events:
            self._grow(stream, stream.add(events, partition), now)
            _notify(stream)

    def end(self, stream: ResumableStream, now: float) -> None:
        """Ends a stream, which has all of its events, and wakes its readers."""
        if self._has(stream) and not stream.ended:
            stream.ended = True
            self._owners[stream.owner].place(stream)
            if stream.policy.detached:
                self._set_deadline(stream, now)
            _notify(stream)

    def find(self, name: str, owner: str) -> ResumableStream:
        """Raises StreamUnknown or StreamGone."""
        stream = self._streams.get(name)
        if stream is not None and stream.owner == owner:
            return stream
        if stream is None and self._gone.get(name) == owner:
            raise StreamGone("it is kept no longer")
        raise StreamUnknown(name)

    def attach(
        self, stream: ResumableStream, received: Sequence[int], on_change: Callable[[], None]
    ) -> StreamReader:
        """A reader whose client has `received` so many events of each partition; empty: none.

        Raises StreamGone if some of the others were dropped, ValueError for events that never were.
        """
        received = received or [0] * len(stream.counts)
        comes = stream.rewritten and not stream.ended  # clients may have received these events
        if len(received) != len(stream.counts) or (not comes and _exceeds(received, stream.counts)):
            raise ValueError("it has no such event")
        if _exceeds(stream.dropped, received):
            raise StreamGone(f"its events are kept from number {stream.first} on")
        if len(stream.readers) >= MAX_READERS:
            _cut_off(stream.readers.pop(0))
        self.resumed += any(received)
        begin, passed = stream.first, stream.dropped
        if len(received) == 1:  # no need to look at those before
            begin = min(received[0], stream.next)
            passed = [begin]
        reader = StreamReader(begin, passed, received, on_change)
        stream.readers.append(reader)
        stream.deadline = inf
        return reader

    def detach(
        self, stream: ResumableStream, reader: StreamReader, now: float, received: bool
    ) -> None:
        """The reader's connection is over; twice is no error. received: its client gets all events
        that the reader took."""
        if reader in stream.readers:
            stream.readers.remove(reader)
            if received and stream.finished(reader) and not stream.delivered:
                stream.delivered = True
                if self._has(stream):
                    self._owners[stream.owner].place(stream)
            self._set_deadline(stream, now)

    def drop(self, name: str) -> None:
        """Forgets a stream as if it never was; an unknown name is no error."""
        stream = self._streams.get(name)
        if stream is not None:
            self._remove(stream)

    def expire(self, now: float) -> None:
        """Drops the streams whose time is over."""
        for stream in [s for s in self._streams.values() if s.deadline <= now]:
            self._drop_for_good(stream, now)

    def check(self) -> None:
        """Raises AssertionError if sums and bounds do not hold."""
        assert self.bytes == sum(s.bytes for s in self._streams.values())
        assert self.bytes == sum(owned.bytes for owned in self._owners.values())
        for owner, owned in self._owners.items():
            mine = {n for n, s in self._streams.items() if s.owner == owner}
            assert mine == {*owned.running, *owned.ended, *owned.delivered} and mine

    def _has(self, stream: ResumableStream) -> bool:
        return self._streams.get(stream.name) is stream

    def _set_deadline(self, stream: ResumableStream, now: float) -> None:
        needs_reader = stream.ended or not stream.policy.detached
        waits = needs_reader and not stream.readers
        stream.deadline = now + stream.policy.seconds if waits else inf

    def _grow(self, stream: ResumableStream, size: int, now: float) -> None:
        owned = self._owners[stream.owner]
        owned.bytes += size
        self.bytes += size
        while owned.bytes > self._bounds.per_owner and self._free_bytes(owned, now):
            continue
        while self.bytes > self._bounds.total:
            largest_first = sorted(self._owners.values(), key=lambda one: -one.bytes)
            if not any(self._free_bytes(one, now) for one in largest_first):
                break

    def _free_bytes(self, owned: _OwnedStreams, now: float) -> bool:
        """Frees some bytes of an owner. False if there are none but those of running streams
        without events."""
        for ended in (owned.delivered, owned.ended):
            if ended:
                self.dropped += 1
                self._drop_for_good(next(iter(ended.values())), now)
                return True
        longest = max(owned.running.values(), key=lambda one: one.bytes - one.fixed, default=None)
        freed = longest.drop_older_half() if longest is not None else 0
        if longest is not None:
            behind = [one for one in longest.readers if one.position < longest.first]
            for reader in behind:
                longest.readers.remove(reader)
                _cut_off(reader)
            if behind:
                self._set_deadline(longest, now)
        self.dropped += freed > 0
        owned.bytes -= freed
        self.bytes -= freed
        return freed > 0

    def _drop_for_good(self, stream: ResumableStream, now: float) -> None:
        self._gone.put(stream.name, stream.owner, now)
        self._remove(stream)

    def _remove(self, stream: ResumableStream) -> None:
        del self._streams[stream.name]
        owned = self._owners[stream.owner]
        owned.remove(stream)
        owned.bytes -= stream.bytes
        self.bytes -= stream.bytes
        if owned.empty:
            del self._owners[stream.owner]
        for reader in stream.readers:
            _cut_off(reader)
        stream.readers.clear()
        self._on_drop(stream.name)


def _exceeds(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether any is greater than its counterpart."""
    return any(one > other for one, other in zip(some, others, strict=True))


def _notify(stream: ResumableStream) -> None:
    for reader in stream.readers:
        reader.on_change()


def _cut_off(reader: StreamReader) -> None:
    reader.lost = True
    reader.on_change()


VERSION = 1  # of the table, in the file's user_version
STORED_SECONDS = 30 * 86_400  # seconds for which a response is stored
BUSY_SECONDS = 10.0  # seconds for which another process may hold the file
MAX_TOGETHER = 256  # pieces of work in one transaction
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT NOT NULL, created REAL NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_time ON responses (created);
"""
COLUMNS = "id, owner, previous, response, input"

Result = TypeVar("Result")


class StoredResponse(NamedTuple):
    """A response of /v1/responses in the store.

    Attributes:
    - owner: name of the key that asked for it
    - previous: id of the response before it, "" for none
    - response, input: JSON of the response, and of the items that came with its own request
    """

    id: str
    owner: str
    previous: str
    response: bytes
    input: bytes


class ConversationBroken(LookupError):
    """A response of a conversation is not stored, or belongs to another key. id: its id."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class ConversationTooLarge(ValueError):
    """A conversation has more bytes or more responses than may be read at once."""


class _Job(NamedTuple):
    """Work for the thread, and what is called with its result, or with an exception."""

    work: Callable[[sqlite3.Connection], object]
    done: Callable[[object, Exception | None], None]


class ResponseStore:
    """The responses in the file `path`, which is made if it is missing, for its owner alone.

    clock(): Unix seconds. Raises ConfigurationError if the file cannot be used.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(f"--store {path}: {reason}") from None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="response-store", daemon=True)
        self._thread.start()

    async def put(self, stored: StoredResponse) -> None:
        """Returns when the response is on the disk. Raises sqlite3.Error."""
        await self._do(partial(_put, stored=stored, now=self._clock()))

    async def get(self, id: str, owner: str) -> StoredResponse | None:
        """The owner's response; None if there is none. Raises sqlite3.Error."""
        return await self._do(partial(_get, id=id, owner=owner))

    async def conversation(
        self, id: str, owner: str, max_responses: int, max_bytes: int
    ) -> list[StoredResponse]:
        """The response and all before it, oldest first.

        Raises ConversationBroken, ConversationTooLarge, sqlite3.Error.
        """
        bounds = max_responses, max_bytes
        return await self._do(partial(_conversation, id=id, owner=owner, bounds=bounds))

    async def delete(self, id: str, owner: str) -> bool:
        """Whether there was such a response. Raises sqlite3.Error."""
        return await self._do(partial(_delete, id=id, owner=owner))

    def close(self) -> None:
        """Does what waits, then closes the file."""
        self._jobs.put(None)
        self._thread.join()

    async def _do(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()

        def settle(result: object, error: Exception | None) -> None:
            if future.done():  # the waiting task was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def done(result: object, error: Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        self._jobs.put(_Job(work, done))
        return await future

    def _run(self) -> None:
        while (first := self._jobs.get()) is not None:
            jobs, last = [first], False
            while len(jobs) < MAX_TOGETHER and not self._jobs.empty() and not last:
                job = self._jobs.get()
                last = job is None
                jobs += [job] if job is not None else []
            self._do_together(jobs)
            if last:
                break
        self._connection.close()

    def _do_together(self, jobs: list[_Job]) -> None:
        """All jobs in one transaction; without a commit none has a result."""
        outcomes: list[tuple[object, Exception | None]] = []
        try:
            with self._connection:
                outcomes += [_outcome(job, self._connection) for job in jobs]
        except sqlite3.Error as error:
            outcomes = [(None, error)] * len(jobs)
        for job, (result, error) in zip(jobs, outcomes, strict=True):
            job.done(result, error)


def _connect(path: str) -> sqlite3.Connection:
    """Raises sqlite3.Error for a file that is no database, or one of a later version."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # a commit survives a loss of power
    connection.execute("PRAGMA secure_delete = ON")  # a deleted text does not stay in the file
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise sqlite3.DatabaseError(f"it is of version {version}, this server knows {VERSION}")
    connection.executescript(TABLE)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.commit()
    return connection


def _outcome(job: _Job, connection: sqlite3.Connection) -> tuple[object, Exception | None]:
    try:
        return job.work(connection), None
    except (LookupError, ValueError) as error:
        return None, error


def _put(connection: sqlite3.Connection, stored: StoredResponse, now: float) -> None:
    connection.execute("DELETE FROM responses WHERE created < ?", (now - STORED_SECONDS,))
    connection.execute(
        f"INSERT OR REPLACE INTO responses ({COLUMNS}, created) VALUES (?, ?, ?, ?, ?, ?)",
        (*stored, now),
    )


def _get(connection: sqlite3.Connection, id: str, owner: str) -> StoredResponse | None:
    query = f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ?"
    row = connection.execute(query, (id, owner)).fetchone()
    return None if row is None else StoredResponse(*row)


def _conversation(
    connection: sqlite3.Connection, id: str, owner: str, bounds: tuple[int, int]
) -> list[StoredResponse]:
    found: list[StoredResponse] = []
    size, (max_responses, max_bytes) = 0, bounds
    while id:
        stored = _get(connection, id, owner)
        if stored is None:
            raise ConversationBroken(id)
        size += len(stored.response) + len(stored.input)
        if len(found) == max_responses or size > max_bytes:
            raise ConversationTooLarge
        found.append(stored)
        id = stored.previous
    return found[::-1]


def _delete(connection: sqlite3.Connection, id: str, owner: str) -> bool:
    query = "DELETE FROM responses WHERE id = ? AND owner = ?"
    return connection.execute(query, (id, owner)).rowcount > 0

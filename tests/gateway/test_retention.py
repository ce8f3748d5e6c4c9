"""Resumable streams against a model: each event once, owners alone, bounds hold. And the file of
responses.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeinfer.gateway.retention import (
    EVENT_BYTES,
    GONE_SECONDS,
    MAX_READERS,
    STORED_SECONDS,
    STREAM_BYTES,
    ConversationBroken,
    ConversationTooLarge,
    ResponseStore,
    ResumableStream,
    ResumableStreams,
    RetentionBounds,
    RetentionPolicy,
    StoredResponse,
    StreamGone,
    StreamReader,
    StreamsFull,
    StreamUnknown,
    parse_event_id,
)
from pipeinfer.settings import ConfigurationError

BOUNDS = RetentionBounds(total=12_000, per_owner=8_000)
ATTACHED, DETACHED = RetentionPolicy(False, 5.0), RetentionPolicy(True, 5.0)


@dataclass
class Written:
    """What a stream was given, and since when nobody need have read it."""

    stream: ResumableStream
    events: list[bytes] = field(default_factory=list)
    alone_since: float = 0.0


@dataclass
class Reading:
    """A connection: where it began, and what it got."""

    name: str
    reader: StreamReader
    begin: int
    got: list[bytes] = field(default_factory=list)
    told: int = 0


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.dropped: set[str] = set()
        self.forgotten: set[str] = set()
        self.streams = ResumableStreams(BOUNDS, self.dropped.add)
        self.written: dict[str, Written] = {}
        self.readings: list[Reading] = []

    def live(self) -> list[str]:
        return [name for name in self.written if name not in self.dropped]

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """Some readers may be lost meanwhile: their streams wait for others from now on."""
        read = [name for name in self.live() if self.written[name].stream.readers]
        try:
            yield
        finally:  # also where there was not room enough
            for name in read:
                if not self.written[name].stream.readers:
                    self.written[name].alone_since = self.now

    def pick(self, data: st.DataObject) -> Written:
        return self.written[data.draw(st.sampled_from(self.live()))]

    @rule(owner=st.sampled_from("ab"), policy=st.sampled_from([ATTACHED, DETACHED]),
          size=st.sampled_from([0, 0, 0, 5_000]))  # fmt: skip
    def open(self, owner: str, policy: RetentionPolicy, size: int) -> None:
        name = f"s{len(self.written)}"
        try:
            with self.making_room():
                stream = self.streams.open(name, owner, policy, size, self.now)
        except StreamsFull:
            self.dropped.discard(name)
            left = [self.written[n].stream for n in self.live()]
            assert sum(s.bytes for s in left) + size + STREAM_BYTES > BOUNDS.per_owner
            return
        self.written[name] = Written(stream, alone_since=self.now)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), sizes=st.lists(st.integers(1, 900), min_size=1, max_size=4))
    def append(self, data: st.DataObject, sizes: list[int]) -> None:
        written = self.pick(data)
        if not written.stream.ended:
            begin = len(written.events)
            events = [bytes([(begin + n) % 256]) * size for n, size in enumerate(sizes)]
            written.events += events
            with self.making_room():
                self.streams.append(written.stream, events, self.now)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        written = self.pick(data)
        if not written.stream.ended and written.stream.policy.detached:
            written.alone_since = self.now
        self.streams.end(written.stream, self.now)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        written = self.pick(data)
        after = data.draw(st.integers(-1, len(written.events)))
        reading = Reading(written.stream.name, StreamReader(0, (0,), (0,), lambda: None), after + 1)

        def tell() -> None:
            reading.told += 1

        try:
            reading.reader = self.streams.attach(written.stream, (after + 1,), tell)
        except ValueError:
            assert after == len(written.events)
        except StreamGone:
            assert after >= -1 and after + 1 < written.stream.first
        else:
            self.readings.append(reading)

    @precondition(lambda self: self.readings)
    @rule(data=st.data(), size=st.sampled_from([1, 400, 10_000]))
    def read(self, data: st.DataObject, size: int) -> None:
        reading = data.draw(st.sampled_from(self.readings))
        stream = self.written[reading.name].stream
        taken = stream.take(reading.reader, size)
        begin, events = reading.begin + len(reading.got), [event for _, event in taken]
        assert [number for number, _ in taken] == [str(begin + n) for n in range(len(taken))]
        reading.got += events
        if not events and not reading.reader.lost:
            assert len(reading.got) + reading.begin == len(self.written[reading.name].events)
            assert stream.finished(reading.reader) == stream.ended

    @precondition(lambda self: self.readings)
    @rule(data=st.data(), received=st.booleans())
    def lose_connection(self, data: st.DataObject, received: bool) -> None:
        reading = self.readings.pop(data.draw(st.integers(0, len(self.readings) - 1)))
        written = self.written[reading.name]
        was_read = bool(written.stream.readers)
        delivered = written.stream.delivered
        self.streams.detach(written.stream, reading.reader, self.now, received)
        if not reading.reader.lost:
            took_all = written.stream.ended and len(reading.got) + reading.begin == len(
                written.events
            )
            assert written.stream.delivered == (delivered or (received and took_all))
        if was_read and not written.stream.readers:
            written.alone_since = self.now

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = self.pick(data).stream.name
        self.streams.drop(name)
        assert name in self.dropped
        self.forgotten.add(name)

    @rule(seconds=st.sampled_from([1.0, 4.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.streams.expire(self.now)
        for name in self.live():
            written = self.written[name]
            needs_reader = written.stream.ended or not written.stream.policy.detached
            if needs_reader and not written.stream.readers:
                assert self.now < written.alone_since + written.stream.policy.seconds
        for name, written in self.written.items():
            if written.alone_since == self.now and name in self.live():
                assert self.streams.find(name, written.stream.owner) is written.stream

    @invariant()
    def every_event_comes_once_and_in_order(self) -> None:
        for reading in self.readings:
            events = self.written[reading.name].events
            assert reading.got == events[reading.begin : reading.begin + len(reading.got)]

    @invariant()
    def sums_and_bounds_hold(self) -> None:
        self.streams.check()
        streams = [self.written[name].stream for name in self.live()]
        assert len(self.streams) == len(streams)
        for owner, bound in (("a", BOUNDS.per_owner), ("b", BOUNDS.per_owner)):
            assert sum(s.bytes for s in streams if s.owner == owner) <= bound
        assert self.streams.bytes <= BOUNDS.total

    @invariant()
    def owners_alone_find_them(self) -> None:
        for name, written in self.written.items():
            owner = written.stream.owner
            with pytest.raises(StreamUnknown):
                self.streams.find(name, "b" if owner == "a" else "a")
            if name not in self.dropped:
                assert self.streams.find(name, owner) is written.stream
            else:
                unknown = name in self.forgotten
                with pytest.raises(StreamUnknown if unknown else StreamGone):
                    self.streams.find(name, owner)

    @invariant()
    def the_dropped_have_no_readers(self) -> None:
        for reading in self.readings:
            attached = reading.reader in self.written[reading.name].stream.readers
            assert attached != reading.reader.lost


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)  # type: ignore[attr-defined]


def kept(bounds: RetentionBounds = BOUNDS) -> tuple[ResumableStreams, list[str]]:
    dropped: list[str] = []
    return ResumableStreams(bounds, dropped.append), dropped


def test_of_the_ended_the_delivered_go_first_then_the_oldest() -> None:
    streams, dropped = kept(RetentionBounds(20_000, 4_000))
    for name in ("old", "delivered", "new"):
        stream = streams.open(name, "a", DETACHED, 0, 0.0)
        streams.append(stream, [b"x"], 0.0)
        streams.end(stream, 0.0)
    stream = streams.find("delivered", "a")
    reader = streams.attach(stream, (), lambda: None)
    stream.take(reader, 100)
    streams.detach(stream, reader, 0.0, received=True)
    for name, expected in (("n1", ["delivered"]), ("n2", ["delivered", "old"])):
        streams.open(name, "a", DETACHED, 0, 0.0)
        assert dropped == expected
    assert streams.dropped == 2
    with pytest.raises(StreamGone, match="longer"):
        streams.find("old", "a")


def test_one_owner_does_not_cost_another_his_streams() -> None:
    streams, dropped = kept(RetentionBounds(10_000, 9_000))
    mine = streams.open("mine", "a", DETACHED, 0, 0.0)
    streams.append(mine, [b"x" * 500], 0.0)
    streams.end(mine, 0.0)
    for n in range(20):
        theirs = streams.open(f"theirs{n}", "b", DETACHED, 0, 0.0)
        streams.append(theirs, [b"x" * 2_000], 0.0)
        streams.end(theirs, 0.0)
    assert "mine" not in dropped and dropped[0] == "theirs0"


def test_a_long_running_stream_loses_its_beginning_and_says_from_where_it_goes_on() -> None:
    streams, dropped = kept(RetentionBounds(4_000, 4_000))
    stream = streams.open("s", "a", ATTACHED, 0, 0.0)
    behind, tip = (streams.attach(stream, (), lambda: None) for _ in range(2))
    got: list[bytes] = []
    for n in range(100):
        streams.append(stream, [b"%d" % n * 50], 0.0)
        got += [event for _, event in stream.take(tip, 10_000)]
    assert got == [b"%d" % n * 50 for n in range(100)] and not tip.lost and not dropped
    assert stream.take(behind, 100) == [] and behind.lost
    with pytest.raises(StreamGone, match=f"from number {stream.first} on"):
        streams.attach(stream, (4,), lambda: None)
    reader = streams.attach(stream, (stream.first,), lambda: None)
    assert [event for _, event in stream.take(reader, 10_000)] == got[stream.first :]


def test_a_thousand_readers_take_the_place_of_each_other() -> None:
    streams, _ = kept()
    stream = streams.open("s", "a", ATTACHED, 0, 0.0)
    told: list[int] = []
    readers = [streams.attach(stream, (), lambda n=n: told.append(n)) for n in range(1000)]
    assert len(stream.readers) == MAX_READERS
    assert [r.lost for r in readers] == [True] * (1000 - MAX_READERS) + [False] * MAX_READERS
    assert told == list(range(1000 - MAX_READERS)), "who is replaced is told"
    for reader in readers[:5]:
        streams.detach(stream, reader, 1.0, received=False)
    streams.append(stream, [b"e"], 1.0)
    assert told[-MAX_READERS:] == list(range(1000 - MAX_READERS, 1000))


def test_what_comes_after_a_drop_or_a_second_attempt_is_nobodys() -> None:
    streams, _ = kept()
    first = streams.open("s", "a", ATTACHED, 0, 0.0)
    streams.drop("s")
    second = streams.open("s", "a", ATTACHED, 0, 0.0)
    streams.append(first, [b"late"], 0.0)
    streams.end(first, 0.0)
    assert second.next == 0 and not second.ended and streams.find("s", "a") is second
    with pytest.raises(ValueError, match="kept already"):
        streams.open("s", "a", ATTACHED, 0, 0.0)
    streams.check()


def test_gone_is_remembered_for_an_hour() -> None:
    streams, dropped = kept()
    streams.open("s", "a", ATTACHED, 0, 0.0)
    streams.expire(4.9)
    assert not dropped
    streams.expire(5.0)
    assert dropped == ["s"]
    later = streams.open("later", "a", ATTACHED, 0, 10.0 + GONE_SECONDS)
    streams.expire(20.0 + GONE_SECONDS)
    assert later.name in dropped
    with pytest.raises(StreamUnknown):
        streams.find("s", "a")


def test_events_count_with_what_they_occupy() -> None:
    streams, _ = kept()
    stream = streams.open("s", "a", ATTACHED, 100, 0.0)
    streams.append(stream, [b"abc", b"d"], 0.0)
    assert streams.bytes == STREAM_BYTES + 100 + 4 + 2 * EVENT_BYTES


class Partitions(RuleBasedStateMachine):
    """A stream of several partitions, which gateways write anew in another order, and clients that
    come back with the id that they had: each gets each event once, those of a partition in their
    order."""

    PARTITIONS = 3

    def __init__(self) -> None:
        super().__init__()
        self.total = [0] * self.PARTITIONS  # events that were written so far, by any gateway
        self.clients: list[Resuming] = [Resuming() for _ in range(3)]
        self.begin()

    def begin(self) -> None:
        """A gateway with an empty stream."""
        self.streams = ResumableStreams(RetentionBounds(10**6, 10**6), lambda _: None)
        self.stream = self.streams.open("s", "a", DETACHED, 0, 0.0, self.PARTITIONS)
        for client in self.clients:
            client.reader = None

    @rule(partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 3))
    def write(self, partition: int, count: int) -> None:
        begin = self.stream.counts[partition]
        events = [b"%d/%d" % (partition, begin + n) for n in range(count)]
        self.streams.append(self.stream, events, 0.0, partition)
        self.total[partition] = max(self.total[partition], begin + count)

    @rule(client=st.integers(0, 2), size=st.sampled_from([1, 6, 1000]))
    def read(self, client: int, size: int) -> None:
        reading = self.clients[client]
        if reading.reader is None:
            had = parse_event_id(reading.event) if reading.event else ()
            assert had is not None
            reading.reader = self.streams.attach(self.stream, had, lambda: None)
        for event, text in self.stream.take(reading.reader, size):
            reading.got.append(text)
            reading.event = event

    @rule(client=st.integers(0, 2))
    def lose_connection(self, client: int) -> None:
        reading = self.clients[client]
        if reading.reader is not None:
            self.streams.detach(self.stream, reading.reader, 0.0, received=False)
            reading.reader = None

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """Another gateway writes what it has heard so far; the rest comes later."""
        self.begin()
        self.stream.rewritten = True
        order = [partition for partition, total in enumerate(self.total) for _ in range(total)]
        shuffled = data.draw(st.permutations(order))
        heard = data.draw(st.integers(0, len(order)))
        for partition in shuffled[:heard]:
            self.write(partition, 1)

    @invariant()
    def each_event_came_once_and_those_of_a_lane_in_order(self) -> None:
        for reading in self.clients:
            for partition in range(self.PARTITIONS):
                mine = [text for text in reading.got if text.startswith(b"%d/" % partition)]
                assert mine == [b"%d/%d" % (partition, n) for n in range(len(mine))]

    def teardown(self) -> None:
        for partition, total in enumerate(self.total):
            while self.stream.counts[partition] < total:
                self.write(partition, 1)
        for client in range(3):
            self.read(client, 10**6)
            assert len(self.clients[client].got) == sum(self.total)


@dataclass
class Resuming:
    """A client: the last event's id, and what it got."""

    event: str = ""
    got: list[bytes] = field(default_factory=list)
    reader: StreamReader | None = None


TestPartitions = Partitions.TestCase
TestPartitions.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)  # type: ignore[attr-defined]


def test_ids_of_several_lanes_are_no_ids_of_one() -> None:
    streams, _ = kept()
    stream = streams.open("s", "a", DETACHED, 0, 0.0, 2)
    streams.append(stream, [b"x"], 0.0, 1)
    for had in ((1,), (1, 0), (0, 2), (0, 0, 0)):
        with pytest.raises(ValueError, match="no such event"):
            streams.attach(stream, had, lambda: None)
    reader = streams.attach(stream, (0, 1), lambda: None)
    assert stream.take(reader, 10) == []
    for text in ("", "a", "1.", ".1", "1..2", "-1", "1" * 16, ".".join("1" * 66)):
        assert parse_event_id(text) is None
    assert parse_event_id(".".join("1" * 65)) == (1,) * 65


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def store(path: Path) -> Iterator[ResponseStore]:
    made = ResponseStore(str(path))
    yield made
    made.close()


def response(number: int, owner: str = "a", previous: str = "") -> StoredResponse:
    return StoredResponse(f"r{number}", owner, previous, b'{"n": %d}' % number, b"[]")


async def test_what_was_put_is_there_for_its_owner_alone(store: ResponseStore) -> None:
    await store.put(response(1))
    assert await store.get("r1", "a") == response(1)
    assert await store.get("r1", "b") is None and await store.get("r2", "a") is None
    assert not await store.delete("r1", "b") and await store.get("r1", "a") is not None
    assert await store.delete("r1", "a") and not await store.delete("r1", "a")


async def test_a_conversation_is_its_chain_of_one_owner(store: ResponseStore) -> None:
    chain = [response(n, previous=f"r{n - 1}" if n else "") for n in range(5)]
    for one in chain:
        await store.put(one)
    await store.put(response(9, owner="b", previous="r4"))
    assert await store.conversation("r3", "a", 10, 1000) == chain[:4]
    for last, owner, missing in (("r9", "b", "r4"), ("r4", "b", "r4"), ("r7", "a", "r7")):
        with pytest.raises(ConversationBroken) as broken:
            await store.conversation(last, owner, 10, 1000)
        assert broken.value.id == missing
    for bounds in ((4, 1000), (10, 40)):
        with pytest.raises(ConversationTooLarge):
            await store.conversation("r4", "a", *bounds)
    await store.delete("r2", "a")
    with pytest.raises(ConversationBroken):
        await store.conversation("r4", "a", 10, 1000)
    await store.put(response(6, previous="r6"))
    with pytest.raises(ConversationTooLarge):
        await store.conversation("r6", "a", 10, 1000)


async def test_many_that_end_together_are_all_on_the_disk(path: Path, store: ResponseStore) -> None:
    await asyncio.gather(*(store.put(response(n)) for n in range(500)))
    other = sqlite3.connect(path)
    assert other.execute("SELECT count(*) FROM responses").fetchone() == (500,)
    assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


async def test_what_waits_is_done_before_it_closes(path: Path) -> None:
    store = ResponseStore(str(path))
    waiting = [asyncio.ensure_future(store.put(response(n))) for n in range(50)]
    await asyncio.sleep(0)
    await asyncio.to_thread(store.close)
    await asyncio.gather(*waiting)
    again = ResponseStore(str(path))
    assert [await again.get(f"r{n}", "a") for n in range(50)] == [response(n) for n in range(50)]
    again.close()


async def test_a_failed_write_is_the_error_of_each_who_waits(
    path: Path, store: ResponseStore
) -> None:
    other = sqlite3.connect(path)
    other.execute("DROP TABLE responses")
    other.commit()
    outcomes = await asyncio.gather(*(store.put(response(n)) for n in range(3)),
                                    return_exceptions=True)  # fmt: skip
    assert all(isinstance(one, sqlite3.Error) for one in outcomes)
    with pytest.raises(sqlite3.Error):
        await store.get("r1", "a")
    other.close()


async def test_a_response_is_stored_for_thirty_days(path: Path) -> None:
    now = [1000.0]
    store = ResponseStore(str(path), lambda: now[0])
    await store.put(response(1))
    now[0] += STORED_SECONDS - 1
    await store.put(response(2))
    assert await store.get("r1", "a") is not None
    now[0] += 2
    await store.put(response(3))
    assert await store.get("r1", "a") is None and await store.get("r2", "a") is not None
    store.close()


def test_only_the_servers_user_may_read_it(path: Path) -> None:
    ResponseStore(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    text, later = tmp_path / "text", tmp_path / "later"
    text.write_text("no database at all " * 100)
    connection = sqlite3.connect(later)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    for path, reason in (
        (text, "not a database"),
        (tmp_path / "none" / "x", "No such file"),
        (tmp_path, "directory"),
        (later, "version 2"),
    ):
        with pytest.raises(ConfigurationError, match=f"--store {path}: .*{reason}"):
            ResponseStore(str(path))
    assert text.read_text().startswith("no database"), "it is left as it was"

"""Files that somebody made to do harm: every one is read, or unreadable, in little memory."""

from __future__ import annotations

import resource
import tracemalloc
import zlib
from contextlib import suppress

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.core import Tick
from pipeinfer.messages import PROTOCOL, Abort, Submit, TokenizedRequest
from pipeinfer.params import RequestParams
from pipeinfer.scheduler.core import SchedulerCore, SchedulerOptions
from pipeinfer.trace import format as form
from pipeinfer.trace.format import OtherProtocol, Trace, TraceHeader, UnreadableTrace
from pipeinfer.trace.redact import TokenPermutation, redact_state
from pipeinfer.trace.snapshot import RestoreError, restore, snapshot
from pipeinfer.wire import pack

HEADER = TraceHeader(protocol=PROTOCOL, version="test", stage="tokenizer-0", name="tokenizer")
SUBMIT = Submit("r", 1, 0, RequestParams(), 0, text="here")
ROWS = [
    (0.0, "in", "requests", "gateway-0", n, 0.0, msgspec.msgpack.encode(message))
    for n, message in enumerate((SUBMIT, Abort("r", 1)))
] + [(0.0, "in", "local", "", 0, 0.0, msgspec.msgpack.encode(Tick()))]  # fmt: skip
OPTIONS = SchedulerOptions("mixed", 2, 64, 512)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "x.pitrace"


def block(raw: bytes) -> bytes:
    """A block as no recorder would write it."""
    packed = zstandard.ZstdCompressor(level=19).compress(raw)
    return form.PREFIX.pack(len(packed), zlib.crc32(packed)) + packed


def header(raw: bytes) -> bytes:
    return form.MAGIC + block(raw)


def read(path, raw: bytes) -> None:
    """All of it; raises what a reader of a trace must expect, and nothing else."""
    path.write_bytes(raw)
    trace = Trace(path)
    for record in trace:
        trace.message(record)


def nested(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\xc0"


def with_settings(value: bytes) -> bytes:
    mark = msgspec.msgpack.encode("the value")
    raw = msgspec.msgpack.encode(msgspec.structs.replace(HEADER, settings={"a": "the value"}))
    assert raw.count(mark) == 1
    return raw.replace(mark, value)


@pytest.mark.parametrize("depth", [40, 500, 900, 100_000])
def test_a_header_that_is_nested_deeply_is_unreadable(path, depth):
    with pytest.raises(UnreadableTrace, match="header"):
        read(path, header(with_settings(nested(depth))))
    read(path, header(with_settings(nested(20))))


@pytest.mark.parametrize("depth", [5_000, 100_000])
def test_records_and_bodies_that_are_nested_deeply_are_unreadable(path, depth):
    begin = form.pack_header(HEADER)
    with pytest.raises(UnreadableTrace):
        read(path, begin + block(b"\x91" * depth + b"\xc0"))
    body = msgspec.msgpack.encode(msgspec.structs.replace(SUBMIT, template_arguments={"a": "here"}))
    mark = msgspec.msgpack.encode({"a": "here"})
    assert body.count(mark) == 1
    row = (*ROWS[0][:6], body.replace(mark, nested(depth)))
    with pytest.raises(UnreadableTrace, match="record 0"):
        read(path, begin + form.pack_records([row]))


def test_what_a_file_expands_to_is_in_proportion_to_its_size(path):
    """10 kB that were 1.2 GB."""
    bombs = [
        block(b"\xc4\xff" + bytes(100_000_000)),
        block(msgspec.msgpack.encode([ROWS[2]] * 2_000_000)),
        form.PREFIX.pack(13, zlib.crc32(lying(1 << 29)[:13])) + lying(1 << 29)[:13],
    ]
    unsized = zstandard.ZstdCompressor(level=19, write_content_size=False).compressobj()
    packed = unsized.compress(bytes(100_000_000)) + unsized.flush()
    bombs.append(form.PREFIX.pack(len(packed), zlib.crc32(packed)) + packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    for bomb in bombs:
        for raw in (form.MAGIC + bomb, form.pack_header(HEADER) + bomb * 3):
            with pytest.raises(UnreadableTrace):
                read(path, raw)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kB


def lying(size: int) -> bytes:
    """A frame that promises `size` bytes and has one."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x09\x00\x00x"


def test_many_small_blocks_expand_no_further_than_one(path):
    one = block(msgspec.msgpack.encode([(*ROWS[2][:6], b"\x91\xa4Tick")] * 600))
    path.write_bytes(form.pack_header(HEADER) + one * 200)
    size = sum(len(record.body) for record in Trace(path))
    assert size < path.stat().st_size * (form.RATIO + form.FLOOR / len(one))


@pytest.mark.parametrize("letters", [1, 10_000, 5_000_000])
def test_what_a_recorder_writes_can_be_read_however_well_it_packs(path, letters):
    text = msgspec.structs.replace(SUBMIT, text="a" * letters)
    rows = [(*ROWS[0][:6], msgspec.msgpack.encode(text))] * 2
    begin = form.pack_header(msgspec.structs.replace(HEADER, snapshot=bytes(letters)))
    path.write_bytes(begin + form.pack_records(rows) * 2)
    trace = Trace(path)
    assert [trace.message(record) for record in trace] == [text] * 4
    assert trace.header.snapshot == bytes(letters)
    assert path.stat().st_size < 5_000 + letters // 10


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
whole = form.pack_header(msgspec.structs.replace(HEADER, settings={"a": [1, {"b": 2}]}))


@settings(deadline=None)
@given(st.data())
def test_a_changed_file_is_read_or_is_unreadable(path, data):
    raw = bytearray(whole + form.pack_records(ROWS) + form.pack_records(ROWS))
    for _ in range(data.draw(st.integers(0, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        read(path, bytes(raw[:cut] if data.draw(st.booleans()) else raw))
    except (UnreadableTrace, OtherProtocol) as error:
        assert str(path) in str(error)


@settings(deadline=None)
@given(st.data())
def test_changed_contents_under_a_right_checksum_are_read_or_unreadable(path, data):
    """What the checksum does not hold off: bytes changed before they were packed."""
    parts = [bytearray(msgspec.msgpack.encode(HEADER)), bytearray(msgspec.msgpack.encode(ROWS))]
    for _ in range(data.draw(st.integers(1, 4))):
        part = parts[data.draw(st.integers(0, 1))]
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        parts[data.draw(st.integers(0, 1))] = bytearray(
            msgspec.msgpack.encode(data.draw(plain | st.lists(plain, max_size=3).map(list)))
        )
    try:
        read(path, header(bytes(parts[0])) + block(bytes(parts[1])))
    except (UnreadableTrace, OtherProtocol) as error:
        assert str(path) in str(error)


def a_state() -> bytes:
    core = SchedulerCore(OPTIONS)
    for number in range(3):
        core.handle(
            TokenizedRequest(f"r{number}", 1, 0, 0, pack([1, 2, 3]), RequestParams(), 0), 1.0
        )
        core._live[f"r{number}"].outputs.extend([4, 5])
    return snapshot(core)


STATE = a_state()


@settings(deadline=None)
@given(st.data())
def test_a_changed_state_is_put_in_or_refused(data):
    version, nodes = msgspec.msgpack.decode(STATE)
    for _ in range(data.draw(st.integers(1, 3))):
        node = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        at = data.draw(st.integers(0, len(node) - 1))
        other = data.draw(st.sampled_from(nodes))
        node[at] = data.draw(
            plain | st.just([data.draw(st.integers(-3, len(nodes)))]) | st.sampled_from(other)
        )
    raw = msgspec.msgpack.encode([version, nodes])
    with suppress(RestoreError):  # anything else is what a reader does not expect
        restore(SchedulerCore(OPTIONS), raw)
    with suppress(ValueError):
        redact_state(raw, lambda message: message, TokenPermutation(b"k" * 16, 100, set()))


@pytest.mark.parametrize("raw", [b"", b"\x91" * 5_000, nested(5_000), b"\x92\x01" + nested(5_000)])
def test_a_state_that_is_none_is_refused(raw):
    with pytest.raises(RestoreError):
        restore(SchedulerCore(OPTIONS), raw)
    with pytest.raises(ValueError):
        redact_state(raw, lambda message: message, TokenPermutation(b"k" * 16, 100, set()))

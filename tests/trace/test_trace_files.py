"""Trace files: what was written is read again, and a file that is not whole says so in one line."""

from __future__ import annotations

import stat
import threading
import zlib

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeinfer.messages import PROTOCOL, Abort
from pipeinfer.trace import format as form
from pipeinfer.trace.format import (
    End,
    ModelIdentity,
    OtherProtocol,
    Record,
    Trace,
    TraceHeader,
    UnreadableTrace,
)
from pipeinfer.trace.recorder import (
    MAX_FLIGHT_RECORDINGS,
    MAX_WAITING_BYTES,
    Quota,
    Recorder,
    Recording,
    TraceFile,
    prune_flight_recordings,
)

HEADER = TraceHeader(
    protocol=PROTOCOL, version="test", stage="scheduler-0", name="scheduler", incarnation=2**63,
    settings={"port": 8000, "model": "m"}, facts={"sizes": (1, 2)}, snapshot=b"\0state",
)  # fmt: skip
rows = st.tuples(
    st.floats(allow_nan=False), st.sampled_from(["in", "out", "note"]), st.sampled_from(["work"]),
    st.text(max_size=8), st.integers(0, 2**63), st.floats(allow_nan=False), st.binary(max_size=40),
)  # fmt: skip
blocks_of_rows = st.lists(st.lists(rows, min_size=1, max_size=6), max_size=5)


def records(blocks) -> list[Record]:
    return [Record(*row, n) for n, row in enumerate(row for block in blocks for row in block)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("trace") / "x.pitrace"


def written(path, blocks) -> bytes:
    raw = form.pack_header(HEADER) + b"".join(map(form.pack_records, blocks))
    path.write_bytes(raw)
    return raw


@settings(deadline=None)
@given(blocks=blocks_of_rows)
def test_what_was_written_is_read_again(path, blocks):
    written(path, blocks)
    trace = Trace(path)
    assert list(trace) == records(blocks) == list(trace)
    assert trace.truncated == ""
    assert trace.header == msgspec.structs.replace(HEADER, facts={"sizes": [1, 2]})


@settings(deadline=None)
@given(blocks=blocks_of_rows, data=st.data())
def test_a_file_that_breaks_off_is_read_up_to_its_last_whole_block(path, blocks, data):
    raw = written(path, blocks)
    begin = len(form.pack_header(HEADER))
    at = data.draw(st.integers(begin, len(raw)))
    path.write_bytes(raw[:at])
    ends = [begin]
    for block in blocks:
        ends.append(ends[-1] + len(form.pack_records(block)))
    whole = sum(end <= at for end in ends) - 1
    trace = Trace(path)
    assert list(trace) == records(blocks[:whole])
    assert (trace.truncated == "") == (at in ends)
    assert at in ends or f"block {whole} at byte {ends[whole]} is not whole" == trace.truncated


@settings(deadline=None)
@given(blocks=blocks_of_rows.filter(bool), data=st.data())
def test_a_damaged_byte_never_gives_other_records(path, blocks, data):
    raw = bytearray(written(path, blocks))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    read = []
    try:
        trace = Trace(path)
        for record in trace:
            read.append(record)
    except UnreadableTrace as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
    else:
        assert trace.truncated
    assert read == records(blocks)[: len(read)]


@pytest.mark.parametrize(
    "raw", [b"", b"PITRACE", b"PK\3\4 something else", b"PITRACE2" + b"x" * 99]
)
def test_a_foreign_file_is_refused_in_one_line(path, raw):
    path.write_bytes(raw)
    with pytest.raises(UnreadableTrace, match=r"x\.pitrace: this is no pipeinfer trace$"):
        Trace(path)


def test_a_file_that_is_not_there_is_refused_in_one_line(tmp_path):
    with pytest.raises(UnreadableTrace, match="No such file"):
        Trace(tmp_path / "none.pitrace")


def test_a_file_that_ends_within_its_header_is_refused(path):
    path.write_bytes(form.pack_header(HEADER)[:-1])
    with pytest.raises(UnreadableTrace, match="ends within its header"):
        Trace(path)


def test_another_protocol_is_named(path):
    other = msgspec.structs.replace(HEADER, protocol=PROTOCOL + 1)
    path.write_bytes(form.pack_header(other))
    with pytest.raises(OtherProtocol, match=f"protocol {PROTOCOL + 1}, .* speaks {PROTOCOL}"):
        Trace(path)
    assert Trace(path, any_protocol=True).header.protocol == PROTOCOL + 1


def test_a_body_of_another_kind_is_refused_with_its_record(path):
    path.write_bytes(
        form.pack_header(HEADER) + form.pack_records([(0.0, "in", "work", "x", 0, 0.0, b"\x91")])
    )
    trace = Trace(path)
    with pytest.raises(UnreadableTrace, match=r"record 0 \(in work\)"):
        trace.message(next(iter(trace)))


def not_utf8(packed: bytes, text: bytes) -> bytes:
    """The same block with that text spoilt."""
    payload = zstandard.ZstdDecompressor().decompress(packed[form.PREFIX.size :])
    assert text in payload
    spoilt = payload.replace(text, b"\x80" * len(text))
    compressed = zstandard.ZstdCompressor().compress(spoilt)
    return form.PREFIX.pack(len(compressed), zlib.crc32(compressed)) + compressed


def test_text_that_is_not_utf8_is_unreadable_wherever_it_stands(path):
    header, rest = form.pack_header(HEADER), len(form.MAGIC)
    path.write_bytes(form.MAGIC + not_utf8(header[rest:], b"scheduler-0"))
    with pytest.raises(UnreadableTrace, match="the header cannot be decoded"):
        Trace(path)
    body = msgspec.msgpack.encode(Abort("r1234", 1))
    block = form.pack_records([(0.0, "in", "requests", "gateway-0", 0, 0.0, body)])
    path.write_bytes(header + not_utf8(block, b"gateway-0"))
    with pytest.raises(UnreadableTrace, match="the records cannot be decoded"):
        list(Trace(path))
    path.write_bytes(header + not_utf8(block, b"r1234"))
    trace = Trace(path)
    with pytest.raises(UnreadableTrace, match=r"record 0 \(in requests\)"):
        trace.message(next(iter(trace)))


def test_files_are_private_and_never_overwritten(tmp_path):
    first, second = (TraceFile(tmp_path / "new", "engine-0-0-17") for _ in range(2))
    assert [f.path.name for f in (first, second)] == [
        "engine-0-0-17.pitrace", "engine-0-0-17-2.pitrace"
    ]  # fmt: skip
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    for file in (first, second):
        file.close()


def test_old_flight_recordings_make_room_and_nothing_else_does(tmp_path):
    kept = tmp_path / "engine-0-0-1.pitrace"
    kept.touch()
    for number in range(MAX_FLIGHT_RECORDINGS + 3):
        TraceFile(tmp_path, f"flight-engine-0-0-{number}").close()
    prune_flight_recordings(tmp_path)
    assert len(list(tmp_path.glob("flight-*"))) == MAX_FLIGHT_RECORDINGS
    assert kept.exists()


# ----------------------------------------------------------------------------- quota of recordings


def event(number: int, size: int = 1) -> list[form.Row]:
    """An input and its two outputs."""
    body = msgspec.msgpack.encode(Abort(f"r{number}", 1, "x" * size))
    return [(float(number), kind, "work", "p", number, 0.0, body) for kind in ("in", "out", "out")]


def recording(folder, quota: Quota):
    outcomes: list = []
    made = Recording("name", folder, quota, outcomes.append)
    made.begin("scheduler-0-0-1", HEADER)
    return made, outcomes


def test_a_recording_ends_with_the_event_that_reaches_its_number_of_messages(tmp_path):
    made, outcomes = recording(tmp_path, Quota(messages=7))
    for number in range(5):
        chunk = event(number) + event(number + 100)
        made.take(chunk, form.pack_records(chunk))
    trace = Trace(outcomes[-1].path)
    found = list(trace)
    assert [r.direction for r in found] == ["in", "out", "out"] * 3 + ["note"]
    assert outcomes[-1].state == "done" and outcomes[-1].records == 9
    assert isinstance(trace.message(found[-1]), End)


def test_a_recording_never_grows_beyond_its_bytes(tmp_path):
    made, outcomes = recording(tmp_path, Quota(bytes=4_000))
    for number in range(1_000):
        made.take(event(number, 300), None)
    assert outcomes[-1].state == "done" and "bytes" in outcomes[-1].reason
    trace = Trace(outcomes[-1].path)
    assert 3_000 < trace.path.stat().st_size <= 4_000
    assert [type(trace.message(r)) for r in trace][-1] is End and not trace.truncated


def test_a_recording_that_could_not_even_begin_fails_with_a_reason(tmp_path):
    _, outcomes = recording(tmp_path, Quota(bytes=100))
    assert outcomes[-1].state == "failed" and "beginning alone" in outcomes[-1].reason
    (tmp_path / "file").touch()
    _, outcomes = recording(tmp_path / "file" / "folder", Quota())
    assert outcomes[-1].state == "failed" and "Not a directory" in outcomes[-1].reason


def test_a_disk_that_cannot_keep_up_stops_the_recording_and_never_the_stage(tmp_path):
    """The thread is held up; what waits for it is bounded, and what was lost is said."""
    held, outcomes = threading.Event(), []
    recorder = Recorder("scheduler-0-0-1", lambda: held.wait(60) and ModelIdentity())
    made = Recording("name", tmp_path, Quota(), outcomes.append)
    recorder.start(made, HEADER)
    big = [(0.0, "in", "work", "p", 0, 0.0, bytes(1 << 20))]
    for _ in range(2 * (MAX_WAITING_BYTES >> 20)):
        for row in big:
            recorder.add(row)
        recorder.flush(0.0)
    assert 0 < recorder.lost < 2 * (MAX_WAITING_BYTES >> 20)
    held.set()
    recorder.close("the end")
    assert [o.state for o in outcomes] == ["recording", "done"]
    trace = Trace(outcomes[-1].path)
    *kept, end = trace
    assert len(kept) + recorder.lost == 2 * (MAX_WAITING_BYTES >> 20)
    assert trace.message(end).lost > 0 and "keep up" in trace.message(end).reason

"""Whatever a peer sends, reading goes on; whatever a stage wants to send, its sending goes on."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.bus import frames
from pipeinfer.bus.bus import Bus, NoSuchStage, Reader
from pipeinfer.bus.curve import ZAP, CurveAuthenticator
from pipeinfer.bus.frames import BadFrame, FrameHeader, Unencodable
from pipeinfer.core import Send
from pipeinfer.messages import CHANNELS, PROTOCOL, Abort, Submit
from pipeinfer.params import RequestParams
from pipeinfer.topology import Identity, StageEntry, Topology
from waiting import until

HEADER = FrameHeader(PROTOCOL, "tokenizer-0", 1, 0, 0.0)
DEEP_ARRAY, DEEP_MAP = b"\x91" * 100_000 + b"\x01", b"\x81\xa1a" * 100_000 + b"\x01"
HERE = msgspec.msgpack.encode("here")
GOOD = frames.encode("work", HEADER, Abort("r", 1))


def submit(**fields: Any) -> Submit:
    values = {"request_id": "r", "attempt": 1, "gateway": 0, "params": RequestParams(), "seed": 0}
    return Submit(**(values | fields))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


UNENCODABLE = {
    "nested": {"template_arguments": nested(5_000)},
    "large number": {"template_arguments": {"a": 2**70}},
    "half a surrogate": {"text": "\ud800"},
    "no plain value": {"template_arguments": {"a": object()}},
}


@pytest.mark.parametrize("fields", UNENCODABLE.values(), ids=UNENCODABLE)
def test_what_has_no_encoding_is_one_kind_of_error_that_can_itself_be_sent(fields):
    with pytest.raises(Unencodable, match="Submit") as caught:
        frames.encode("requests", HEADER, submit(**fields))
    assert str(caught.value).isascii()


def test_a_frame_that_its_receiver_would_cut_the_connection_for_is_not_sent(monkeypatch):
    monkeypatch.setattr(frames, "FRAME_BYTES", 1_000)
    assert frames.encode("requests", HEADER, submit(text="x" * 500))
    with pytest.raises(Unencodable, match="bytes are more than 1000"):
        frames.encode("requests", HEADER, submit(text="x" * 1_000))


async def test_what_cannot_be_sent_leaves_no_hole_in_the_numbers():
    place = Topology(tuple(StageEntry(n, f"inproc://hole-{n}") for n in ("gateway", "tokenizer")))
    with zmq.Context() as context:
        sender, receiver = (Bus(Identity(e.name), 1, place, context) for e in place.entries)
        heard: list[tuple[int, str]] = []
        receiver.bind()
        receiver.start(lambda _c, header, message: heard.append((header.seq, message.request_id)))
        for message in (Abort("a", 1), submit(text="\ud800"), Abort("b", 1)):
            try:
                sender.send(Send("requests", "tokenizer-0", message))
            except Unencodable:
                continue
        for stage in ("tokenizer-1", "engine-x", "scheduler", "gateway--1"):
            with pytest.raises(NoSuchStage, match="no stage"):
                sender.send(Send("requests", stage, Abort("nobody's", 1)))
        await until(lambda: len(heard) == 2)
        assert heard == [(0, "a"), (1, "b")]
        sender.close()
        receiver.close()


async def test_deeply_nested_frames_are_counted_and_what_comes_after_them_is_read():
    with zmq.Context() as context:
        reader, heard = Reader(), []
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        inbox.bind("inproc://deep")
        outbox.connect("inproc://deep")
        reader.add(inbox)
        reader.start(lambda _channel, _header, message: heard.append(message))
        for deep in (DEEP_ARRAY, DEEP_MAP):
            encoded = msgspec.msgpack.encode(submit(template_arguments={"a": "here"}))
            assert encoded.count(HERE) == 1
            outbox.send_multipart([b"requests", GOOD[1], encoded.replace(HERE, deep)])
            # One field more than the header has, which is skipped, however deep it is.
            outbox.send_multipart([b"requests", b"\x96" + GOOD[1][1:] + deep, encoded])
        outbox.send_multipart(GOOD)
        await until(lambda: heard)
        assert heard == [Abort("r", 1)] and reader.bad_frames == 4
        reader.close()
        outbox.close(linger=0)


async def test_a_handler_that_raises_does_not_end_the_reading(caplog):
    with zmq.Context() as context:
        reader, heard = Reader(), []

        def handler(_channel, _header, message) -> None:
            heard.append(message.request_id)
            if message.request_id == "0":
                raise RuntimeError("a handler's own fault")

        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        inbox.bind("inproc://handler")
        outbox.connect("inproc://handler")
        reader.add(inbox)
        reader.start(handler)
        await asyncio.sleep(0.01)  # the first look at the inbox finds nothing
        for number in range(3):
            outbox.send_multipart(frames.encode("work", HEADER, Abort(str(number), 1)))
        await until(lambda: len(heard) == 3)
        assert "a handler's own fault" in caplog.text
        reader.close()
        outbox.close(linger=0)


channels = st.sampled_from([*CHANNELS, "control", "none"])
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
bodies = st.one_of(
    st.binary(max_size=60),
    plain.map(msgspec.msgpack.encode),
    st.builds(lambda tag, rest: msgspec.msgpack.encode([tag, *rest]),
              st.sampled_from(["Submit", "TokenizedRequest", "Plan", "Tokens", "Text", "Heartbeat",
                               "Result"]),
              st.lists(plain, max_size=16)),
    st.builds(lambda depth, one: one * depth + b"\x01", st.integers(0, 3_000),
              st.sampled_from([b"\x91", b"\x81\x01", b"\x81\x91", b"\x92\xc0"])),
)  # fmt: skip


@given(channels.map(str.encode) | st.binary(max_size=9), bodies | st.just(GOOD[1]), bodies)
def test_bytes_decode_to_a_frame_or_are_a_bad_frame(channel, header, body):
    try:
        frames.decode([channel, header, body])
    except BadFrame as error:
        assert str(error)


@given(st.data())
def test_a_frame_with_bytes_changed_decodes_or_is_a_bad_frame(data):
    arguments = {"template_arguments": data.draw(plain.map(lambda value: {"a": value}))}
    parts = [bytearray(p) for p in frames.encode("requests", HEADER, submit(**arguments))]
    for _ in range(data.draw(st.integers(1, 4))):
        part = parts[data.draw(st.integers(0, 2))]
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames.decode([bytes(part) for part in parts])
    except BadFrame as error:
        assert str(error)


def test_the_gate_answers_after_a_question_that_is_none_and_an_event_that_is_none():
    key = zmq.curve_keypair()[0]
    with zmq.Context() as context:
        gate = CurveAuthenticator(context, frozenset((key,)))
        asker = context.socket(zmq.REQ)
        asker.rcvtimeo, asker.linger = 10_000, 0
        asker.connect(ZAP)
        for question in ([b""], [b"1.0", b"7"], [b"\xff"] * 5):
            asker.send_multipart(question)
            assert asker.recv_multipart()[2] == b"500"
        for event in ([b"short", b""], [b"\x01" * 6], [struct.pack("=hi", -3, -1), b"\xff"]):
            assert gate._on_monitor_event(event, "")
        asker.send_multipart([b"1.0", b"8", b"", b"::1", b"", b"CURVE", zmq.utils.z85.decode(key)])
        assert asker.recv_multipart()[2] == b"200"
        assert gate.refused_handshakes >= 3
        asker.close()
        gate.close()

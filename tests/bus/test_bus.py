"""The bus over real sockets: typed frames, a late peer misses nothing, bad ones kill nothing, and
a process has room for a socket to every stage of its deployment."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.bus import frames
from pipeinfer.bus.bus import INBOX_HWM, Bus, SocketFactory
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import (
    PROTOCOL,
    Abort,
    BeginEpoch,
    Heartbeat,
    Plan,
    StopHit,
    TokenRow,
    Tokens,
)
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Identity, StageEntry, Topology, check_address, socket_address
from pipeinfer.wire import pack, unpack
from port_rows import port_row

HEADER = FrameHeader(PROTOCOL, "scheduler-0", 1, 0, 0.0)


def topology(prefix: str) -> Topology:
    names = ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")
    return Topology(tuple(StageEntry(name, prefix + name) for name in names))


@pytest.fixture(params=["inproc", "ipc", "tcp"])
def place(request, short_path):
    if request.param == "tcp":
        port = port_row(16)
        entries = [
            StageEntry(name, f"tcp://127.0.0.1:{port + 4 * i}")
            for i, name in enumerate(("gateway", "tokenizer", "scheduler", "engine"))
        ]
        return Topology(tuple(entries))
    return topology("inproc://" if request.param == "inproc" else f"ipc://{short_path}/")


class Peer:
    """A bus with a list of what came."""

    def __init__(self, name: str, place: Topology, context: zmq.Context) -> None:
        self.bus = Bus(Identity(name), 1, place, context)
        self.heard: list = []
        self._news = asyncio.Event()

    def start(self) -> None:
        self.bus.bind()
        self.bus.start(self._hear)

    def _hear(self, channel, header, message) -> None:
        self.heard.append((channel, header, message))
        self._news.set()

    async def has(self, many: int) -> list:
        async with asyncio.timeout(20):
            while len(self.heard) < many:
                self._news.clear()
                await self._news.wait()
        return self.heard


async def test_messages_wait_for_a_peer_that_starts_later(place):
    with zmq.Context() as context:
        sender, receiver = Peer("gateway", place, context), Peer("tokenizer", place, context)
        sender.start()
        for number in range(300):
            sender.bus.send(Send("requests", "tokenizer-0", Abort(f"r{number}", 1)))
        receiver.start()
        heard = await receiver.has(300)
        assert [m.request_id for _, _, m in heard] == [f"r{n}" for n in range(300)]
        assert [h.seq for _, h, _ in heard] == list(range(300))
        sender.bus.close()
        receiver.bus.close()


async def test_plans_reach_a_subscriber_and_repeated_begin_mends_a_late_one(place):
    with zmq.Context() as context:
        scheduler, engine = Peer("scheduler", place, context), Peer("engine", place, context)
        scheduler.start()
        scheduler.bus.send(Send("plan", EVERYONE, BeginEpoch(1, (7,))))  # nobody listens yet
        engine.start()
        engine.bus.listen("scheduler-0", "plan")
        async with asyncio.timeout(20):
            while not engine.heard:
                scheduler.bus.send(Send("plan", EVERYONE, BeginEpoch(2, (7,))))
                await asyncio.sleep(0.01)
        first = engine.heard[0][2]
        assert first == BeginEpoch(2, (7,))
        scheduler.bus.close()
        engine.bus.close()


@pytest.mark.parametrize(
    ("address", "most"),
    [
        ("ipc:///tmp/x", 100),
        ("inproc://x", 100),
        ("tcp://127.0.0.1:7000", 100),
        ("tcp://127.64.3.2:7000", 100),
        ("tcp://[::1]:7000", 100),
        ("tcp://localhost:7000", 100),
        ("tcp://192.0.2.1:7000", 2_000),
    ],
)
def test_peers_of_one_host_reconnect_at_once_and_others_ever_later(address, most):
    place = Topology((StageEntry("engine", address),))
    with zmq.Context() as context:
        factory = SocketFactory(place, context)
        socket = factory.socket(zmq.SUB)
        factory.connect(socket, "engine-0-0", "telemetry")
        assert (socket.reconnect_ivl, socket.reconnect_ivl_max) == (100, most)
        socket.close(linger=0)


async def test_bad_frames_are_counted_and_dropped_and_kill_nothing(place, caplog):
    with zmq.Context() as context:
        peer = Peer("scheduler", place, context)
        peer.start()
        raw = context.socket(zmq.PUSH)
        raw.connect(socket_address(place.address("scheduler-0"), "inbox"))
        good = frames.encode("work", HEADER, Abort("r", 1))
        old = FrameHeader(PROTOCOL + 1, "tokenizer-0", 1, 0, 0.0)
        for parts in (
            [b"work"],
            [b"no-such-channel", *good[1:]],
            [b"work", b"\xc1", good[2]],
            [b"work", good[1], b"\xc1\xc1"],
            [b"work", good[1], msgspec.msgpack.encode(["TokenizedRequest", 1, 2])],
            [b"stops", good[1], good[2]],
            frames.encode("work", old, Abort("r", 1)),
            good,
        ):
            raw.send_multipart(parts)
        heard = await peer.has(1)
        assert [m for _, _, m in heard] == [Abort("r", 1)]
        assert peer.bus.reader.bad_frames == 7
        said = caplog.text
        assert f"speaks protocol {PROTOCOL + 1}, this process {PROTOCOL}" in said
        assert "bad message from scheduler-0" in said
        raw.close(linger=0)
        peer.bus.close()


def test_every_message_of_the_hot_path_survives_the_wire():
    plan = Plan(3, 9, (), (), pack([1, 2]), pack([1, 512]))
    rows = Tokens((TokenRow("r", 0, pack([5]), "stop", 5, "", 3),))
    beat = Heartbeat("engine-0-0", "engine", 0, 0, 0, 1, 2, "ready", "", {"pages_free": 3.0})
    for channel, message in (("plan", plan), ("tokens", rows), ("telemetry", beat)):
        parts = frames.encode(channel, HEADER, message)
        assert frames.decode(parts) == (channel, HEADER, message)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_travel_as_little_endian_int32(ids):
    raw = pack(ids)
    assert len(raw) == 4 * len(ids)
    assert unpack(raw).tolist() == ids
    assert raw == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_no_bytes_make_the_decoder_raise_anything_but_bad_frame(parts):
    for candidate in (
        parts,
        [b"stops", *parts],
        frames.encode("stops", HEADER, _hit())[:1] + parts,
    ):
        try:
            frames.decode(candidate)
        except frames.BadFrame:
            continue


@pytest.mark.parametrize(("part", "text"), [(1, b"scheduler-0"), (2, b"StopHit"), (2, b"r1234")])
def test_text_that_is_not_utf8_is_a_bad_frame(part, text):
    parts = frames.encode("stops", HEADER, StopHit("r1234", 1, 3))
    assert text in parts[part]
    parts[part] = parts[part].replace(text, b"\x80" * len(text))
    with pytest.raises(frames.BadFrame, match="channel stops: bad"):
        frames.decode(parts)


def _hit() -> StopHit:
    return StopHit("r", 1, 3)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://0.0.0.0:5000", "CURVE"),
        ("tcp://example.org:5000", "CURVE"),
        ("tcp://127.0.0.1", "HOST:PORT"),
        ("tcp://127.0.0.1:65535", "port"),
        ("udp://127.0.0.1:1", "begin with"),
        ("ipc://" + "x" * 100, "90 bytes"),
        ("ipc://", "begin with"),
    ],
)
def test_addresses_that_cannot_work_are_refused(address, why):
    with pytest.raises(ConfigurationError, match=why):
        check_address(address)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5000", "tcp://[::1]:5000", "tcp://localhost:1"]
)
def test_loopback_needs_no_keys(address):
    check_address(address)


async def test_what_a_stage_has_no_time_to_read_waits_with_its_sender(place):
    """A flood fills the sender's own queue, not the memory of the stage; nothing is dropped."""
    if place.address("scheduler-0").startswith("inproc"):
        pytest.skip("both ends are one process")
    with zmq.Context() as context, zmq.Context() as other, other.socket(zmq.PUSH) as raw:
        peer = Peer("scheduler", place, context)
        peer.bus.bind()
        raw.sndhwm, raw.linger = 1, 0
        raw.connect(socket_address(place.address("scheduler-0"), "inbox"))
        parts = [*frames.encode("work", HEADER, Abort("r", 1))[:2], b"\xc1" * 50_000]
        sent = 0
        # All that has room leaves sooner or later; what has none is still here half a second later.
        while sent < 10 * INBOX_HWM and raw.poll(20_000 if sent < INBOX_HWM else 500, zmq.POLLOUT):
            raw.send_multipart(parts, zmq.NOBLOCK)
            sent += 1
        assert INBOX_HWM <= sent < 2 * INBOX_HWM
        peer.bus.start(peer._hear)
        async with asyncio.timeout(20):
            while peer.bus.reader.bad_frames < sent:
                await asyncio.sleep(0.01)
        peer.bus.close()


# With a soft limit of 256 descriptors, as a process may find it.
MANY_SOCKETS = """
import resource, sys, zmq
from pipeinfer.bus.bus import raise_socket_limits
from pipeinfer.settings import Settings
from pipeinfer import topology
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
place = topology.local(Settings(dp=150, tp=8), "ipc:///tmp/nowhere/")
context = zmq.Context()
if sys.argv[1] == "room":
    raise_socket_limits(context, place)
sockets = []
for entry in place.entries:
    socket = context.socket(zmq.SUB)
    socket.connect(entry.address)
    sockets.append(socket)
print(len(sockets))
context.destroy(linger=0)
"""


def connect_many(word: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MANY_SOCKETS, word], capture_output=True, text=True, check=False
    )


def test_there_may_be_more_sockets_than_zeromq_and_the_system_allow_at_first():
    assert "Too many open files" in connect_many("none").stderr
    made = connect_many("room")
    assert made.returncode == 0, made.stderr
    assert int(made.stdout) == 150 * 9 + 3

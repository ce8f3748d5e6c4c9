"""CURVE on real sockets: who has the keys talks, who has not gets nothing and one log line."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
from contextlib import suppress

import pytest
import zmq

from pipeinfer.bus import curve
from pipeinfer.bus.bus import Bus, ControlClient
from pipeinfer.bus.curve import LOG_PERIOD, MAX_REASONS, RefusalLog
from pipeinfer.core import EVERYONE, Send
from pipeinfer.messages import Abort, Heartbeat
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import Identity, StageEntry, Topology, socket_address
from port_rows import port_row

BEAT = Heartbeat("tokenizer-0", "tokenizer", 0, 0, 0, 1, 1, "ready")


def free_ports(count: int, apart: int = 10) -> list[int]:
    """The first ports of as many rows of free ones."""
    first = port_row(apart * count)
    return [first + apart * n for n in range(count)]


class Stage:
    """A bus in a context of its own, as a process has it, with what it heard."""

    def __init__(self, name: str, topology: Topology) -> None:
        self.context = zmq.Context()
        self.bus = Bus(Identity(name), 1, topology, self.context)
        self.heard: list = []
        self._news = asyncio.Event()
        self.bus.bind()
        self.bus.start(self._hear)

    def _hear(self, _channel, _header, message) -> None:
        self.heard.append(message)
        self._news.set()

    async def hears(self, message) -> None:
        async with asyncio.timeout(20):
            while message not in self.heard:
                self._news.clear()
                await self._news.wait()

    async def refuses(self, more_than: int) -> int:
        async with asyncio.timeout(20):
            while self.bus.refused_handshakes <= more_than:
                await asyncio.sleep(0.01)
        return self.bus.refused_handshakes

    def close(self) -> None:
        self.bus.close()
        self.context.term()


@pytest.fixture(params=["127.0.0.1", "[::1]", "localhost"])
def place(request, tmp_path):
    if request.param == "[::1]" and not _has_ipv6():
        pytest.skip("no IPv6 loopback here")
    for name in ("front", "gpu"):
        curve.create_key_pair(tmp_path / "keys", name)
    first, second = free_ports(2)
    entries = (
        StageEntry("gateway", f"tcp://{request.param}:{first}", key="front"),
        StageEntry("tokenizer", f"tcp://{request.param}:{second}", key="gpu"),
    )
    return Topology(entries, keys=str(tmp_path / "keys"))


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_stages_with_keys_talk_in_both_directions(place):
    gateway, tokenizer = Stage("gateway", place), Stage("tokenizer", place)
    try:
        gateway.bus.send(Send("requests", "tokenizer-0", Abort("down", 1)))
        await tokenizer.hears(Abort("down", 1))
        gateway.bus.listen("tokenizer-0", "telemetry")
        async with asyncio.timeout(20):
            while BEAT not in gateway.heard:
                tokenizer.bus.send(Send("telemetry", EVERYONE, BEAT))
                await asyncio.sleep(0.02)
        assert gateway.bus.refused_handshakes == tokenizer.bus.refused_handshakes == 0
    finally:
        gateway.close()
        tokenizer.close()


async def test_a_command_line_with_one_of_the_keys_hears_a_stage(place):
    tokenizer = Stage("tokenizer", place)
    try:
        with zmq.Context() as context, ControlClient(place, context) as caller:
            caller.listen("tokenizer-0")
            async with asyncio.timeout(20):
                while True:
                    tokenizer.bus.send(Send("telemetry", EVERYONE, BEAT))
                    if any(m == BEAT for _, m in await asyncio.to_thread(caller.receive, 0.05)):
                        break
    finally:
        tokenizer.close()


def stranger(kind: int, context: zmq.Context, server: bytes | None) -> zmq.Socket:
    """A socket with keys that nobody knows, or without any."""
    made = context.socket(kind)
    made.linger, made.ipv6 = 0, True
    if server is not None:
        made.curve_serverkey = server
        made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
    return made


async def test_strangers_get_nothing_give_nothing_and_cost_one_log_line(place, caplog):
    """With a key that is not allowed, with a wrong idea of ours, without CURVE, with plain text."""
    caplog.set_level(logging.WARNING)
    tokenizer = Stage("tokenizer", place)
    host, _, number = place.address("tokenizer-0").removeprefix("tcp://").rpartition(":")
    port = int(number)
    ours = tokenizer.bus._sockets._keyring.own.public
    context = zmq.Context()
    try:
        told = [stranger(zmq.PUSH, context, key) for key in (ours, zmq.curve_keypair()[0], None)]
        ears = [stranger(zmq.SUB, context, key) for key in (ours, None)]
        refused = 0
        for made in (*told, *ears):
            made.connect(f"tcp://{host}:{port + (made.type == zmq.SUB)}")
            if made.type == zmq.SUB:
                made.subscribe(b"")
            else:
                with suppress(zmq.Again):  # it was refused before, and has no peer any more
                    made.send_multipart([b"requests", b"x", b"y"], zmq.NOBLOCK)
            refused = await tokenizer.refuses(refused)
        with socket.create_connection((host.strip("[]"), port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            assert await asyncio.to_thread(_all_until_closed, plain) is not None
        for _ in range(20):
            tokenizer.bus.send(Send("telemetry", EVERYONE, BEAT))
            await asyncio.sleep(0.01)
        assert not any(ear.poll(0) for ear in ears)
        assert tokenizer.heard == []
        assert tokenizer.bus.reader.bad_frames == 0
        assert len([r for r in caplog.records if "handshakes refused" in r.message]) == 1
        assert ours.decode() not in caplog.text
    finally:
        context.destroy(linger=0)
        tokenizer.close()


def _all_until_closed(plain: socket.socket) -> bytes:
    plain.settimeout(20)
    got = b""
    try:
        while more := plain.recv(4096):
            got += more
    except ConnectionResetError:
        return got
    return got


async def test_a_stage_whose_peer_refuses_its_key_says_so(place, tmp_path, caplog):
    for name in ("front", "gpu"):
        curve.create_key_pair(tmp_path / "others", name)
    wrong = Topology(place.entries, keys=str(tmp_path / "others"))
    tokenizer, gateway = Stage("tokenizer", place), Stage("gateway", wrong)
    try:
        gateway.bus.send(Send("requests", "tokenizer-0", Abort("r", 1)))
        await gateway.refuses(0)
        async with asyncio.timeout(20):
            while "tokenizer-0 at tcp://" not in caplog.text:
                await asyncio.sleep(0.02)
        assert tokenizer.heard == []
    finally:
        gateway.close()
        tokenizer.close()


async def test_what_was_sent_to_a_stage_that_refuses_it_arrives_when_it_knows_the_key(
    place, tmp_path
):
    """As after a mistake in the keys of one host, which is mended there and started again."""
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "keys", old)
    for file in old.glob("front.*"):
        file.unlink()
    curve.create_key_pair(old, "front")
    gateway = Stage("gateway", place)
    tokenizer = Stage("tokenizer", Topology(place.entries, keys=str(old)))
    try:
        gateway.bus.send(Send("requests", "tokenizer-0", Abort("first", 1)))
        await tokenizer.refuses(0)
        gateway.bus.send(Send("requests", "tokenizer-0", Abort("second", 1)))
        assert tokenizer.heard == []
        tokenizer.close()
        tokenizer = Stage("tokenizer", place)
        await tokenizer.hears(Abort("second", 1))
        assert tokenizer.heard == [Abort("first", 1), Abort("second", 1)]
    finally:
        gateway.close()
        tokenizer.close()


async def test_a_stage_without_keys_among_those_that_have_some_ends_with_the_reason(place):
    """The peer says in its greeting that it uses CURVE. A socket that says this alone, and does not
    hang up first, as a real peer may: only who reads the greeting before that learns the reason."""
    entry = next(entry for entry in place.entries if entry.name == "tokenizer")
    inbox = socket_address(entry.address, "inbox")
    host, _, port = inbox.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        while await reader.read(1000):
            continue
        writer.close()

    server = await asyncio.start_server(greet, host.strip("[]"), int(port))
    gateway = Stage("gateway", Topology(place.entries))
    try:
        with pytest.raises(RuntimeError, match=r"tokenizer-0 at tcp://.* must both use CURVE keys"):
            async with asyncio.timeout(60):
                while True:
                    gateway.bus.send(Send("requests", "tokenizer-0", Abort("r", 1)))
                    await asyncio.sleep(0.02)
    finally:
        gateway.close()
        server.close()


async def test_a_stage_without_its_key_does_not_start(place, tmp_path):
    (tmp_path / "keys" / "gpu.key").unlink()
    with pytest.raises(ConfigurationError, match=r"gpu\.key is not there"):
        Stage("tokenizer", place)


async def test_an_address_of_another_host_is_not_bound(tmp_path):
    curve.create_key_pair(tmp_path, curve.DEFAULT_KEY)
    place = Topology((StageEntry("gateway", "tcp://192.0.2.1:7000"),), keys=str(tmp_path))
    with pytest.raises(ConfigurationError, match="no address of this host"):
        Stage("gateway", place)


async def test_a_stage_behind_another_address_listens_where_it_is_told(tmp_path, short_path):
    curve.create_key_pair(tmp_path, curve.DEFAULT_KEY)
    [port] = free_ports(1)
    named = StageEntry("tokenizer", f"tcp://192.0.2.1:{port}", bind="127.0.0.1")
    outside = StageEntry("tokenizer", f"tcp://127.0.0.1:{port}")
    gateway = StageEntry("gateway", f"ipc://{short_path}/gateway")
    inner = Stage("tokenizer", Topology((named, gateway), keys=str(tmp_path)))
    outer = Stage("gateway", Topology((outside, gateway), keys=str(tmp_path)))
    try:
        outer.bus.send(Send("requests", "tokenizer-0", Abort("r", 1)))
        await inner.hears(Abort("r", 1))
    finally:
        outer.close()
        inner.close()


def test_refusals_are_said_at_once_and_then_once_a_minute(caplog):
    refusals = RefusalLog(logging.getLogger("gate"))
    refusals.log_suppressed(0.0)
    refusals.record("10.0.0.1 shows an unknown key")
    refusals.log_suppressed(1.0)
    for second in range(2, 60):
        refusals.record("10.0.0.1 shows an unknown key")
        refusals.log_suppressed(float(second))
    assert len(caplog.records) == 1
    refusals.log_suppressed(1.0 + LOG_PERIOD)
    assert [r.message for r in caplog.records] == [
        "handshakes refused: 10.0.0.1 shows an unknown key (1 time)",
        "handshakes refused: 10.0.0.1 shows an unknown key (58 times)",
    ]
    assert refusals.total == 59


def test_any_number_of_reasons_is_one_bounded_line(caplog):
    refusals = RefusalLog(logging.getLogger("gate"))
    for number in range(10_000):
        refusals.record(f"10.0.{number // 256}.{number % 256} shows an unknown key")
    refusals.log_suppressed(1.0)
    [record] = caplog.records
    assert record.message.count("unknown key") == MAX_REASONS
    assert f"others ({10_000 - MAX_REASONS:,} times)" in record.message

"""A pipeline on keyed tcp under attack on every port: it serves on, stays small and logs little."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq

from pipeinfer import topology as topologies
from pipeinfer.bus import curve, frames
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.messages import PROTOCOL, Abort
from pipeinfer.settings import Settings
from pipeinfer.topology import Topology, socket_address
from port_rows import port_row
from servers import Server

ATTACK = 0.7  # seconds
TRIES = 5  # attacks, of which one has time enough
PATIENCE = 60.0  # seconds for what a slow stage does late
GROWTH = 100 << 20  # bytes that a stage may be larger afterwards, besides what it always needs
LINES = 30  # of log: four kinds of bad frames and, once a minute, handshakes, at five stages


def deployed(folder: Path) -> Topology:
    curve.create_key_pair(folder / "keys", curve.DEFAULT_KEY)
    local = topologies.local(Settings(), "ipc:///x/")
    first = port_row(4 * len(local.entries))
    entries = (
        topologies.StageEntry(e.name, f"tcp://127.0.0.1:{first + 4 * n}")
        for n, e in enumerate(local.entries)
    )
    return Topology(tuple(entries), {"kv_pages": 500, "threads": 1}, keys=str(folder / "keys"))


class Victim:
    """A server on tcp with keys, its ports, and its processes."""

    def __init__(self, topology: Topology, server: Server) -> None:
        self.topology, self.server = topology, server
        self.pids = self._pids()
        self.sizes = self._sizes()
        self.lines = len(server.log)
        self.began = time.monotonic()

    def _pids(self) -> dict[str, int]:
        return {stage["name"]: stage["pid"] for stage in self.server.health()["stages"]}

    def _sizes(self) -> dict[str, int]:
        return {name: psutil.Process(pid).memory_info().rss for name, pid in self.pids.items()}

    def ports(self) -> list[int]:
        """Every port that listens: inboxes, telemetry, and the scheduler's plans."""
        found = []
        for entry in self.topology.entries:
            for name in ("inbox", "telemetry", *["plan"] * (entry.name == "scheduler")):
                found.append(int(socket_address(entry.address, name).rsplit(":", 1)[1]))
        return found

    def answers(self) -> None:
        body = {"prompt": "count from 1 to 5", "max_tokens": 5, "temperature": 0}
        status, answer = self.server.post("/v1/completions", body)
        assert status == 200, answer

    def _all_ready(self) -> bool:
        return {s["state"] for s in self.server.health()["stages"]} == {"ready"}

    def unharmed(self) -> None:
        assert self._pids() == self.pids
        self.server.wait(self._all_ready, "all are ready")
        grown = {n: size - self.sizes[n] for n, size in self._sizes().items()}
        assert max(grown.values()) < GROWTH, grown
        said = self.server.log[self.lines :]
        assert len(said) <= LINES, "\n".join(said)
        assert max(map(len, said), default=0) < 2_000


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flood")
    topology = deployed(folder)
    file = folder / "pipeinfer.toml"
    file.write_text(topology.to_toml())
    with Server("--topology", str(file)) as running:
        running.post("/v1/completions", {"prompt": "warm", "max_tokens": 5})
        yield topology, running


@pytest.fixture
def victim(server):
    return Victim(*server)


def attack(victim: Victim, one: Callable[[int, float], None]) -> None:
    """`one(port, until)` on every port at once, while requests are answered."""
    until = time.monotonic() + ATTACK
    threads = [threading.Thread(target=one, args=(port, until)) for port in victim.ports()]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        victim.answers()
    for thread in threads:
        thread.join()
    victim.answers()
    victim.unharmed()


def test_garbage_bytes_and_connections_that_say_nothing(victim):
    def one(port: int, until: float) -> None:
        noise = random.Random(port)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        # Like a peer of today for as long as it takes to be believed, then garbage.
        starts = [b"", b"\xff", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE", b"GET / HTTP/1.1\r\n"]
        while time.monotonic() < until:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                try:
                    raw.sendall(noise.choice(starts) + noise.randbytes(50_000))
                except OSError:
                    continue  # hung up on, as it should be
        for raw in silent:
            raw.close()

    attack(victim, one)


def test_wrong_keys_get_in_nowhere(victim):
    ours = curve.load_public(Path(victim.topology.keys), curve.DEFAULT_KEY)
    before, log = _sums(victim, "bad_frames"), victim.server.log

    def refused() -> Counter[str]:
        return Counter(line.split()[2] for line in list(log) if "handshakes refused" in line)

    def told(deadline: float) -> bool:
        """Whether each stage has said so. A stage that is slow has no handshake in a moment."""
        assert time.monotonic() < deadline, refused()
        return set(refused()) == set(victim.topology.ids())

    def one(port: int, until: float) -> None:
        with zmq.Context() as context:
            while time.monotonic() < until or not told(until + PATIENCE):
                made = context.socket(zmq.PUSH if port % 2 else zmq.SUB)
                made.linger, made.sndhwm = 0, 100
                for key in (ours, zmq.curve_keypair()[0]):
                    made.curve_serverkey = key
                    made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
                    made.connect(f"tcp://127.0.0.1:{port}")
                if made.type == zmq.PUSH:
                    for _ in range(50):
                        made.send_multipart([b"requests", b"x" * 1000, b"y" * 1000], zmq.NOBLOCK)
                time.sleep(0.05)
                made.close()

    attack(victim, one)
    assert _sums(victim, "bad_frames") == before
    assert told(time.monotonic() + PATIENCE)
    earlier = sum("handshakes refused" in line for line in log[: victim.lines])
    minutes = 1 + int((time.monotonic() - victim.began) / 60)
    assert sum(refused().values()) - earlier <= minutes * len(refused())


def test_floods_of_bad_frames_by_somebody_with_the_key(victim):
    """Of another version, of no channel, too short, too long; what cannot be read waits outside."""
    pair = curve.load_key_pair(Path(victim.topology.keys), curve.DEFAULT_KEY)
    old = frames.encode("work", FrameHeader(PROTOCOL - 1, "old", 1, 0, 0.0), Abort("r", 1))
    kinds = [old, [b"x" * 10_000, b"", b""], [b"work"] * 50, [b"plan", b"\xc1", b"z" * 100_000]]
    before = _sums(victim, "bad_frames")

    def one(port: int, until: float) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as made:
            made.linger, made.sndhwm = 0, 1_000
            made.curve_serverkey = pair.public
            made.curve_publickey, made.curve_secretkey = pair.public, pair.secret
            made.connect(f"tcp://127.0.0.1:{port}")
            number = 0
            while time.monotonic() < until:
                if made.poll(100, zmq.POLLOUT):
                    made.send_multipart(kinds[number % len(kinds)], zmq.NOBLOCK)
                    number += 1
                if number % 100 == 0:
                    time.sleep(0.001)  # the machine has other things to do as well

    for _ in range(TRIES):
        attack(victim, one)
        if (counted := _sums(victim, "bad_frames") - before) > 300:
            break
    assert counted > 300
    server, said = victim.server, f"old speaks protocol {PROTOCOL - 1}, this process {PROTOCOL}"
    server.wait(lambda: any(said in line for line in list(server.log)), "it is said")


def _sums(victim: Victim, statistic: str) -> float:
    """Of all stages, by their own heartbeats."""
    from pipeinfer.bus.bus import ControlClient

    with zmq.Context() as context, ControlClient(victim.topology, context) as caller:
        for stage in victim.topology.ids():
            caller.listen(stage)
        found: dict[str, float] = {}
        deadline = time.monotonic() + PATIENCE
        while len(found) < len(victim.topology.entries) and time.monotonic() < deadline:
            for header, message in caller.receive(1.0):
                if hasattr(message, "stats"):
                    found[header.sender] = message.stats[statistic]
    assert len(found) == len(victim.topology.entries)
    return sum(found.values())

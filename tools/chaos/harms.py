"""The harms of a storm, drawn from a seed, and how each is done: signals, cut links, a full disk.

Links: every stage listens on one loopback address (`bind`), and is known to the others under
another (`address`), where the link to it begins; the ports are the same. Linux has all of
127.0.0.0/8, so no port of anybody else is in the way.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from harness.processes import Helper
from harness.server import ServerUnderTest, Stage, name_of
from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.topology import PORT_OFFSETS


class Broken(AssertionError):
    """A promise to a client that was not kept."""


FIRST_PORT = 7000  # of the first stage
PORTS = 10  # from a stage's port to that of the next


class Network:
    """Links to each stage of a server with `settings`, as a context manager. file: the topology."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        low, mid, high = os.getpid() & 255, os.getpid() >> 8 & 255, os.getpid() >> 16 & 63
        self._listen = f"127.{64 + high}.{mid}.{low}"
        self._goal = f"127.{128 + high}.{mid}.{low}"
        local = topologies.local(config.build(dict(settings)), "ipc:///nowhere/")
        self._ports: dict[Stage, int] = {}
        entries: list[topologies.StageEntry] = []
        for number, entry in enumerate(local.entries):
            port = self._ports[entry.identity.id] = FIRST_PORT + PORTS * number
            address = f"tcp://{self._listen}:{port}"
            entries.append(msgspec.structs.replace(entry, address=address, bind=self._goal))
        handle, self.file = tempfile.mkstemp(prefix="pipeinfer-chaos-", suffix=".toml")
        os.close(handle)
        Path(self.file).write_text(replace(local, entries=tuple(entries)).to_toml())

    def __enter__(self) -> Network:
        ports = [port + offset for port in self._ports.values() for offset in PORT_OFFSETS.values()]
        self._helper = Helper("chaos.links:run", listen=self._listen, goal=self._goal, ports=ports)
        self._helper.next()
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.finish()
        Path(self.file).unlink()

    def change(
        self, verb: str, stages: Iterable[Stage], sockets: Sequence[str], *numbers: float
    ) -> None:
        """ "hold", "cut", "slow" or "mend" of the links to these stages' sockets."""
        ports = [self._ports[stage] + PORT_OFFSETS[name] for stage in stages for name in sockets]
        self._helper.tell([verb, ports, *numbers])


DISK_BYTES = 1 << 20  # of the tmpfs
FREE_BYTES = 48 << 10  # when recordings begin
FILE_BYTES = 4 << 10  # that a file may have, where a limit stands for the disk's end
LATE = 60.0  # seconds for a recording to end after its time


class SmallDisk:
    """A folder for recordings, as a context manager. way: "tmpfs" or "rlimit". reason: what the
    kernel says to who writes on."""

    def __enter__(self) -> SmallDisk:
        self._stack = ExitStack()
        made = tempfile.TemporaryDirectory(prefix="pipeinfer-chaos-")
        self.folder = Path(self._stack.enter_context(made))
        words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.folder)]
        try:
            mounted = subprocess.run(words, capture_output=True).returncode == 0
        except FileNotFoundError:
            mounted = False
        self.way = "tmpfs" if mounted else "rlimit"
        self.reason = os.strerror(errno.ENOSPC if mounted else errno.EFBIG)
        if mounted:
            self._stack.callback(subprocess.run, ["umount", "-l", str(self.folder)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def record(self, topology: str, seconds: float, pids: Iterable[int], log: int) -> None:
        """Has all stages of the server with the topology file `topology` record, and the disk ends.

        log: bytes that the stages' other file, their log, has. Raises Broken unless at least one
        recording says that there was no room, and none fails for another reason.
        """
        full = self._filled() if self.way == "tmpfs" else _limited(pids, log + FILE_BYTES)
        words = ["record", "--topology", topology, "--seconds", str(seconds)]
        with full, tempfile.TemporaryDirectory(dir=self.folder) as out:
            told = subprocess.run(
                [sys.executable, "-m", "pipeinfer", *words, "--out", out],
                capture_output=True, text=True, timeout=seconds + LATE,
            )  # fmt: skip
        failed = told.stderr.strip().splitlines()
        if told.returncode != 1 or not failed or not all(self.reason in line for line in failed):
            raise Broken(f"recording on a full disk ended with {told.returncode}: {told.stderr}")

    @contextmanager
    def _filled(self) -> Iterator[None]:
        filler = self.folder / "filler"
        free = os.statvfs(self.folder)
        filler.write_bytes(b"\0" * max(free.f_bavail * free.f_frsize - FREE_BYTES, 0))
        try:
            yield
        finally:
            filler.unlink()


@contextmanager
def _limited(pids: Iterable[int], most: int) -> Iterator[None]:
    """No file of these processes grows beyond `most` bytes. Python ignores the signal for it."""
    processes = [psutil.Process(pid) for pid in pids]
    limits = [process.rlimit(resource.RLIMIT_FSIZE) for process in processes]
    for process, (_, hard) in zip(processes, limits, strict=True):
        process.rlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        for process, before in zip(processes, limits, strict=True):
            process.rlimit(resource.RLIMIT_FSIZE, before)


def kill(server: ServerUnderTest, victims: Sequence[Stage]) -> None:
    """-9 of all of them; returns when others are in their places and the server is well."""
    before = server.pids()
    _signal((before[victim] for victim in victims), signal.SIGKILL)
    _well(server, before, victims)


def stop(server: ServerUnderTest, victims: Sequence[Stage], seconds: float) -> None:
    """Nobody is told that they stand still, and that they go on."""
    before = server.pids()
    processes = [before[victim] for victim in victims]
    _signal(processes, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        _signal(processes, signal.SIGCONT)
    _well(server, before, ())


def unhurt(server: ServerUnderTest, harm: Callable[[], None]) -> None:
    """Something that must cost no process."""
    before = server.pids()
    harm()
    _well(server, before, ())


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)


def _well(server: ServerUnderTest, before: dict[Stage, int], killed: Sequence[Stage]) -> None:
    """Waits until it is; of a group with a killed engine, all ranks may be others now."""
    now: dict[Stage, int] = {}

    def back() -> bool:
        nonlocal now
        health = server.health()
        now = {row["stage"]: row["pid"] for row in health["stages"]}
        replaced = all(now.get(victim) not in (None, before[victim]) for victim in killed)
        return replaced and health["status"] == "ready"

    try:
        server.wait(back, f"{' and '.join(killed) or 'the server'} came back")
    except TimeoutError as error:
        raise Broken(str(error)) from None
    groups = {_group_of(stage) for stage in killed if name_of(stage) == "engine"}
    lost = [
        stage
        for stage, process in before.items()
        if now.get(stage) != process
        and stage not in killed
        and not (name_of(stage) == "engine" and _group_of(stage) in groups)
    ]
    if lost:
        raise Broken(f"nobody hurt {lost}, and they are other processes now")


def _group_of(engine: Stage) -> str:
    """The number of an engine rank's data-parallel group."""
    return engine.split("-")[1]


KINDS = {
    "kill": "kill -9 of a stage",
    "two": "two stages killed at once",
    "stop": "SIGSTOP of a stage, and SIGCONT after some seconds",
    "hold": "nothing passes on a stage's links for some seconds, as with a pulled cable",
    "cut": "who hears a stage is cut off: dropped, and refused for some seconds",
    "sever": "who tells a stage is cut off: dropped, with what was on its way, and refused",
    "slow": "bytes for a stage come late, and few a second",
    "full": "the disk is full while stages record",
}
LINKS = ("hold", "cut", "sever", "slow")  # kinds that need a network between stages
SPARED = ("kill", "two")  # kinds that the gateway is spared: its connections would be gone
WAIT = 1.0  # seconds at most before a harm


@dataclass(frozen=True)
class Harm:
    """`stages`: the stages that suffer, none if all do. sockets: whose links, of those that have
    any. wait: seconds before it."""

    kind: str
    stages: tuple[Stage, ...]
    sockets: tuple[str, ...]
    wait: float

    def __str__(self) -> str:
        return f"{'+'.join(self.stages)} {' '.join(self.sockets)}".strip()


def drawn(kinds: Sequence[str], stages: Sequence[Stage], count: int, seed: int) -> list[Harm]:
    """`count` harms; each round has one of each kind, in a drawn order.

    The first harms are the same for every count, so a long storm can be told in pieces.
    """
    source = random.Random(seed)
    harms: list[Harm] = []
    while len(harms) < count:
        harms += [_harm(kind, sorted(stages), source) for kind in source.sample(kinds, len(kinds))]
    return harms[:count]


def _harm(kind: str, stages: Sequence[Stage], source: random.Random) -> Harm:
    wait = source.uniform(0.0, WAIT)
    if kind == "full":
        return Harm(kind, (), (), wait)
    names = sorted(set(map(name_of, stages)) - ({"gateway"} if kind in SPARED else set()))
    chosen = source.sample(names, 2 if kind == "two" else 1)
    victims = tuple(source.choice([s for s in stages if name_of(s) == name]) for name in chosen)
    if kind not in LINKS:
        return Harm(kind, victims, (), wait)
    heard = ("plan", "telemetry") if chosen == ["scheduler"] else ("telemetry",)
    there = {"cut": heard, "sever": ("inbox",)}.get(kind, ("inbox", *heard))
    few = tuple(sorted(source.sample(there, source.randint(1, len(there)))))
    return Harm(kind, victims, few, wait)

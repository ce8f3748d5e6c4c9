"""A network between the stages of one server: a topology over tcp, and the links of chaos/links.py.

Every stage listens on one loopback address (`bind`), and is known to the others under another
(`address`), where the link to it begins; the ports are the same. Linux has all of 127.0.0.0/8, so
no port of anybody else is in the way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from chaos.serving import Stage
from chaos.streams import TOOL
from pipeinfer import settings as config
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.addresses import OFFSETS

FIRST, ROW = 7000, 10  # the port of the first stage, and how far it is to that of the next


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
            port = self._ports[entry.name, entry.group, entry.rank] = FIRST + ROW * number
            address = f"tcp://{self._listen}:{port}"
            entries.append(msgspec.structs.replace(entry, address=address, bind=self._goal))
        handle, self.file = tempfile.mkstemp(prefix="pipeinfer-chaos-", suffix=".toml")
        os.close(handle)
        Path(self.file).write_text(replace(local, entries=tuple(entries)).to_toml())

    def __enter__(self) -> Network:
        ports = [port + offset for port in self._ports.values() for offset in OFFSETS.values()]
        words = ["links", "--listen", self._listen, "--goal", self._goal, "--ports"]
        self._process = subprocess.Popen(
            [sys.executable, TOOL, *words, *map(str, ports)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._hear("up")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        Path(self.file).unlink()

    def change(
        self, verb: str, stages: Iterable[Stage], sockets: Sequence[str], *numbers: float
    ) -> None:
        """ "hold", "cut", "slow" or "mend" of the links to these stages' sockets; see links.py."""
        ports = [self._ports[stage] + OFFSETS[name] for stage in stages for name in sockets]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, ports, *numbers]) + "\n")
        self._process.stdin.flush()
        self._hear("done")

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.strip() != word:
            raise RuntimeError(f"the links say {line!r} and end with {self._process.poll()}")

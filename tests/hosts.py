"""Hosts made of network namespaces, on a switch that delays, loses and cuts; see cable_switch.py.

A process started on a host sees that host's interfaces and no others. Needs root and iproute2.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
SWITCH = Path(__file__).with_name("cable_switch.py")


def missing() -> str:
    """Why there can be no such hosts here, or nothing."""
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"pi-try-{uuid.uuid4().hex[:8]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Hosts by name, with the addresses 10.77.0.1, 10.77.0.2, ... in that order."""

    def __init__(self, *names: str, delay: float = 0.002, loss: float = 0.001) -> None:
        self._tag = f"pi-{uuid.uuid4().hex[:6]}"
        self.addresses = {name: f"10.77.0.{n + 1}" for n, name in enumerate(names)}
        self._hub = f"{self._tag}-hub"
        self._made: list[str] = []
        try:
            self._make(self._hub)
            for number, name in enumerate(names):
                self._plug(name, number)
            self.switch = subprocess.Popen(
                ["ip", "netns", "exec", self._hub, sys.executable, str(SWITCH),
                 *(f"port{n}" for n in range(len(names))),
                 "--delay", str(delay), "--loss", str(loss)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert self.switch.stdout is not None
            assert self.switch.stdout.readline() == "up\n"
        except BaseException:
            self._remove()
            raise

    def _make(self, namespace: str) -> None:
        ip("netns", "add", namespace)
        self._made.append(namespace)
        ip("-n", namespace, "link", "set", "lo", "up")

    def _plug(self, name: str, number: int) -> None:
        host, port = self.namespace(name), f"port{number}"
        self._make(host)
        ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns",
           self._hub)  # fmt: skip
        ip("-n", host, "addr", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "eth0", "up")
        ip("-n", self._hub, "link", "set", port, "up")

    def namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def command(self, name: str, *words: str) -> list[str]:
        """`words`, to be run on host `name`."""
        return ["ip", "netns", "exec", self.namespace(name), *words]

    def call(self, name: str, function: Callable[[], T]) -> T:
        """The function's result, computed by a thread that lives on host `name`."""

        def there() -> T:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path("/run/netns", self.namespace(name)).open() as namespace:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return function()

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(there).result()

    def pids(self, name: str) -> list[int]:
        """The processes of host `name`."""
        command = ["ip", "netns", "pids", self.namespace(name)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def cut(self, name: str) -> None:
        """Pulls the host's cable: nobody is told, nothing arrives."""
        self._tell("cut", name)

    def join(self, name: str) -> None:
        """Puts it in again."""
        self._tell("join", name)

    def _tell(self, verb: str, name: str) -> None:
        assert self.switch.stdin is not None and self.switch.stdout is not None
        self.switch.stdin.write(f"{verb} port{list(self.addresses).index(name)}\n")
        self.switch.stdin.flush()
        assert self.switch.stdout.readline() == "done\n"

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.switch.stdin.close()
        self.switch.wait(10)
        self._remove()

    def _remove(self) -> None:
        for namespace in self._made:
            ip("netns", "del", namespace)

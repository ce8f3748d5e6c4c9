"""A network switch in user space that delays and loses frames, and pulls out cables when told to.

Its ports are interfaces of the namespace it runs in, the far ends are hosts'. What the kernel's own
emulator would do, for kernels without it. Commands on stdin, a line each: "cut PORT", "join PORT".
"""

from __future__ import annotations

import argparse
import heapq
import random
import selectors
import socket
import sys
import time

ETH_P_ALL, SOL_PACKET = 0x0003, 263
IGNORE_OUTGOING, VNET_HDR = 23, 15
HEADER = 10  # of VNET_HDR: checksums and segments that are still to be made, handed on as they are
ROOM = 1 << 17
BROADCAST = b"\xff" * 6


class Switch:
    """Forwards frames between `ports`, each `delay` seconds later, a share `loss` of them never."""

    def __init__(self, ports: list[str], delay: float, loss: float, seed: int) -> None:
        self._delay, self._loss, self._random = delay, loss, random.Random(seed)
        self._sockets = {port: self._open(port) for port in ports}
        self._cut: set[str] = set()
        self._known: dict[bytes, str] = {}  # hardware address -> port
        self._late: list[tuple[float, int, str, bytes]] = []
        self._count = 0

    @staticmethod
    def _open(port: str) -> socket.socket:
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        raw.setsockopt(SOL_PACKET, VNET_HDR, 1)
        raw.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        raw.bind((port, 0))
        raw.setblocking(False)
        return raw

    def run(self) -> None:
        """Until stdin ends."""
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        for port, raw in self._sockets.items():
            selector.register(raw, selectors.EVENT_READ, port)
        print("up", flush=True)
        while True:
            wait = max(self._late[0][0] - time.monotonic(), 0) if self._late else None
            for key, _ in selector.select(wait):
                if key.data is not None:
                    self._take(key.data)
                elif not self._obey(sys.stdin.readline()):
                    return
            self._give()

    def _obey(self, line: str) -> bool:
        verb, _, port = line.strip().partition(" ")
        if verb in ("cut", "join"):
            (self._cut.add if verb == "cut" else self._cut.discard)(port)
            print("done", flush=True)
        return bool(line)

    def _take(self, port: str) -> None:
        for _ in range(64):
            try:
                frame = self._sockets[port].recv(ROOM)
            except BlockingIOError:
                return
            if port in self._cut or self._random.random() < self._loss:
                continue
            to, sender = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
            self._known[sender] = port
            goal = self._known.get(to)
            goals = [goal] if goal else [other for other in self._sockets if other != port]
            for other in goals:
                self._count += 1
                due = time.monotonic() + self._delay
                heapq.heappush(self._late, (due, self._count, other, frame))

    def _give(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, port, frame = heapq.heappop(self._late)
            if port not in self._cut:
                self._sockets[port].send(frame)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ports", nargs="+")
    parser.add_argument("--delay", type=float, default=0.002)
    parser.add_argument("--loss", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    Switch(asked.ports, asked.delay, asked.loss, asked.seed).run()

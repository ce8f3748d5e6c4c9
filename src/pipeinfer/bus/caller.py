"""Asks running stages something on the channel `control`, and hears what they say.

For command lines: it blocks and needs no event loop. Binds nothing; knows no stage.
"""

from __future__ import annotations

import os
import time

import zmq

from pipeinfer.bus import frames
from pipeinfer.bus.frames import Header
from pipeinfer.bus.wires import Wires
from pipeinfer.control import CHANNEL
from pipeinfer.messages import PROTOCOL, Message
from pipeinfer.topology.topology import Topology


class Caller:
    """Talks to stages of `topology`. Use it as a context manager.

    An answer is lost if it is given before the subscription has arrived: ask a stage only when
    something (a heartbeat) was heard of it.
    """

    def __init__(self, topology: Topology, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._wires = Wires(topology, context)
        self._wires.open()
        self._name = f"caller-{os.getpid()}"
        self._incarnation = time.time_ns()
        self._ears: list[zmq.Socket[bytes]] = []
        self._mouths: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._asked = 0

    def listen(self, stage: str) -> None:
        """Hears stage id `stage` from now on: its heartbeats and its answers."""
        ear = self._wires.socket(zmq.SUB)
        ear.maxmsgsize = frames.TELEMETRY_BYTES
        ear.subscribe(b"telemetry")
        ear.subscribe(CHANNEL.encode())
        self._wires.connect(ear, stage, "telemetry")
        self._poller.register(ear, zmq.POLLIN)
        self._ears.append(ear)

    def ask(self, stage: str, message: Message) -> None:
        """Sends `message` to the inbox of stage id `stage`. Raises Unencodable."""
        mouth = self._mouths.get(stage)
        if mouth is None:
            mouth = self._mouths[stage] = self._wires.socket(zmq.PUSH)
            self._wires.connect(mouth, stage, "inbox")
        header = Header(PROTOCOL, self._name, self._incarnation, self._asked, time.monotonic())
        self._asked += 1
        mouth.send_multipart(frames.encode(CHANNEL, header, message))

    def hear(self, seconds: float) -> list[tuple[Header, Message]]:
        """What came, after waiting at most `seconds` for the first of it."""
        heard: list[tuple[Header, Message]] = []
        for ear, _ in self._poller.poll(int(seconds * 1_000)):
            try:
                _, header, message = frames.decode(ear.recv_multipart(zmq.NOBLOCK))
            except frames.BadFrame:
                continue  # of another version perhaps; whoever waits for an answer says so
            heard.append((header, message))
        return heard

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in (*self._ears, *self._mouths.values()):
            socket.close(linger=1_000)

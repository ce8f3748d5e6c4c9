"""Frames as a peer may send them: decoded, and read from a socket behind which others wait.

An input is the parts of one frame. Nothing but BadFrame comes out of decoding; a reader hands every
frame on or counts it, and the next one arrives.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from random import Random

import zmq

from fuzz import inputs
from fuzz.engines import Wrong
from pipeinfer.bus import frames
from pipeinfer.bus.bus import Reader
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.messages import PROTOCOL, Abort, Message

SHARE = 8  # one of so many inputs goes through a socket
PATIENCE = 5.0  # seconds for what waits behind a frame
MARK = "marker"


def make() -> Frames:
    """The target."""
    return Frames()


class Frames:
    """See Target."""

    instrumented = ("pipeinfer.bus.frames", "pipeinfer.bus.bus")

    def __init__(self) -> None:
        logging.getLogger("pipeinfer").setLevel(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._reader, self._marks, self._handled = Reader(), 0, 0
        self._runs = 0
        inbox = self._context.socket(zmq.PULL)
        inbox.bind("inproc://fuzz")
        self._reader.add(inbox)
        self._outbox.connect("inproc://fuzz")
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        self._reader.start(self._handle)

    def _handle(self, _channel: str, header: FrameHeader, _message: Message) -> None:
        self._handled += 1
        self._marks += header.sender == MARK

    def seeds(self) -> list[bytes]:
        """A valid frame of each message of each channel, twice."""
        source, found = Random(1), []
        for channel in inputs.NAMES:
            for info in inputs.kinds(channel) * 2:
                value = inputs.drawn(info, source)
                found.append(_frame(channel, inputs.encode(value)))
        return found

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Another frame: its message, its channel, its header or its number of parts."""
        pieces = inputs.parts(data)
        kind = source.randrange(10)
        if len(pieces) != 3 or kind == 0:
            channel = source.choice(inputs.NAMES)
            return _frame(channel, inputs.encode(inputs.example(channel, source)))
        if kind < 6:
            pieces[2] = inputs.mutated_message(pieces[2], source)
        elif kind == 6:
            pieces[0] = source.choice(inputs.NAMES).encode()
        elif kind == 7:
            pieces[1] = inputs.mutated_message(pieces[1], source)
        elif kind == 8:
            pieces[source.randrange(3)] = bytes(inputs.raw(source))
        else:
            pieces.insert(source.randrange(4), source.choice(pieces))
        return inputs.joined(pieces)

    def one(self, data: bytes) -> None:
        """Decodes the frame; now and then, and whenever it is run alone, a reader reads it too."""
        pieces = inputs.parts(data)
        self._runs += 1
        if zlib.crc32(data) % SHARE == 0 or self._runs == 1:
            self._read(pieces)
        try:
            frames.decode(pieces)
        except frames.BadFrame as error:
            if not str(error):
                raise Wrong("a BadFrame that says nothing") from None

    def _read(self, pieces: list[bytes]) -> None:
        marks, before = self._marks, self._handled + self._reader.bad_frames
        header = FrameHeader(PROTOCOL, MARK, 1, 0, 0.0)
        sent = 1
        if pieces:
            self._outbox.send_multipart(pieces)
            sent = 2
        self._outbox.send_multipart(frames.encode("requests", header, Abort("r", 1)))
        self._loop.run_until_complete(self._until(marks))
        if self._marks == marks:
            raise Wrong("the reader reads no more")
        counted = self._handled + self._reader.bad_frames - before
        if counted != sent:
            raise Wrong(f"of {sent} frames {counted} were handled or counted as bad")

    async def _until(self, marks: int) -> None:
        deadline = self._loop.time() + PATIENCE
        while self._marks == marks and self._loop.time() < deadline:
            await asyncio.sleep(0)

    def close(self) -> None:
        """Closes the sockets."""
        self._reader.close()
        self._outbox.close(linger=0)
        self._context.term()
        self._loop.close()


def _frame(channel: str, body: bytes) -> bytes:
    header = inputs.encode(FrameHeader(PROTOCOL, "gateway-0", 1, 0, 0.0))
    return inputs.joined([channel.encode(), header, body])

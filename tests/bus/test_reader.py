"""When the loop that reads frames sleeps between them, and when it does not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import zmq

from pipeinfer.bus import bus, frames
from pipeinfer.bus.bus import Reader
from pipeinfer.bus.frames import FrameHeader
from pipeinfer.messages import PROTOCOL, Abort, Heartbeat, Message
from waiting import until

ABORT = Abort("r", 1)
BEAT = Heartbeat("engine-0-0", "engine", 0, 0, 0, 1, 1, "ready")


class Pair:
    """A reader, what it heard, and the socket of whoever sends to it."""

    def __init__(self, context: zmq.Context, patience: float) -> None:
        self.reader, self.heard, self._number = Reader(), [], 0
        inbox = context.socket(zmq.PULL)
        inbox.bind("inproc://reader")
        self.reader.add(inbox)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.connect("inproc://reader")
        self.reader.start(
            lambda _channel, header, _message: self.heard.append(header.seq), patience
        )

    async def send(self, channel: str = "requests", message: Message = ABORT) -> None:
        """One frame; returns when it was handled."""
        header = FrameHeader(PROTOCOL, "gateway-0", 1, self._number, 0.0)
        self._number += 1
        self._outbox.send_multipart(frames.encode(channel, header, message))
        await until(lambda: self._number - 1 in self.heard)

    def close(self) -> None:
        self.reader.close()
        self._outbox.close(linger=0)


async def test_it_stays_awake_after_frames_in_quick_succession_and_then_sleeps(turns, monkeypatch):
    now = 100.0
    monkeypatch.setattr(bus, "time", SimpleNamespace(monotonic=lambda: now))
    with zmq.Context() as context:
        pair = Pair(context, patience=1.0)
        await pair.send()
        assert not pair.reader.busy_polling  # one frame alone says nothing of the next
        await pair.send()
        assert pair.reader.busy_polling
        await until(lambda: len(turns) > 10)
        now += 0.9
        assert pair.reader.busy_polling
        now += 0.1
        await until(lambda: not pair.reader.busy_polling)
        slept = len(turns)
        await asyncio.sleep(0.02)
        assert len(turns) == slept
        pair.close()


async def test_it_sleeps_between_frames_that_are_far_apart(turns):
    with zmq.Context() as context:
        pair = Pair(context, patience=0.005)
        for _ in range(3):
            await pair.send()
            await asyncio.sleep(0.01)
        assert pair.heard == [0, 1, 2]
        assert not turns
        pair.close()


async def test_it_sleeps_whatever_is_told_about_health(turns):
    with zmq.Context() as context:
        pair = Pair(context, patience=60.0)
        for _ in range(3):
            await pair.send("telemetry", BEAT)
        assert not pair.reader.busy_polling and not turns
        pair.close()


async def test_without_patience_it_always_sleeps(turns):
    with zmq.Context() as context:
        pair = Pair(context, patience=0.0)
        for _ in range(3):
            await pair.send()
        assert not pair.reader.busy_polling and not turns
        pair.close()


async def test_a_reader_that_is_closed_does_not_keep_the_loop_awake(turns):
    with zmq.Context() as context:
        pair = Pair(context, patience=60.0)
        await pair.send()
        await pair.send()
        assert pair.reader.busy_polling
        pair.close()
        await until(lambda: not pair.reader.busy_polling)

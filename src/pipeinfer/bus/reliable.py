"""Reliable links between two stages over TCP: nothing that was sent is lost with its connection.

ZeroMQ opens a connection again that was reset, but what was on its way is gone. So frames to an
inbox are numbered from 1 and kept until the receiver has them; a receiver that misses some asks for
them, and drops what comes behind until they have come: each frame passes once, in order, as long as
both processes live ("go back N"). Sans-IO; knows no message but its own two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar, Union

from pipeinfer.messages import Message

CHANNEL = "link"
REPORT_FRAMES, REPORT_BYTES = (
    64,
    1 << 20,
)  # received since the last word about it; then there is another one
RETRY_SECONDS = 5.0  # seconds; on a slow link what was sent again queues behind what cannot be used


class Received(Message, frozen=True):
    """To a sender, of which `incarnation` is meant: all frames before `next` have come; 0: which
    will be the first is not known. missing: they are wanted once more, from `next` on."""

    incarnation: int
    next: int
    missing: bool


class Retained(Message, frozen=True):
    """To a receiver: frames from `first` on are kept, and those before `next` have been sent."""

    first: int
    next: int


LINK = Union[Received, Retained]


class OutgoingLink:
    """What one process sends to one inbox, until it is acknowledged.

    Attributes:
    - first: number of the oldest frame that is kept
    - next: number of the next frame to be sent
    - max_expiries: calls of `expire` that a frame outlives without being acknowledged; then it is
      dropped, because the receiver's host does not come back
    """

    def __init__(self, max_expiries: int = 1 << 30) -> None:
        self.first = self.next = 1
        self._frames: deque[list[bytes]] = deque()
        self._first_before = 0  # where they began when it was asked last what is due
        self._max_expiries = max_expiries
        self._next_numbers: deque[int] = deque()  # what was to come when it was asked so often

    def append(self, parts: list[bytes]) -> None:
        """The next frame, which was sent."""
        self._frames.append(parts)
        self.next += 1

    def on_received(self, until: int) -> None:
        """Frames before `until` are kept no longer."""
        while self.first < min(until, self.next):
            self._frames.popleft()
            self.first += 1

    def expire(self) -> bool:
        """To be called regularly: whether frames were dropped that nobody acknowledged."""
        if not self._frames:
            self._next_numbers.clear()
            return False
        self._next_numbers.append(self.next)
        if len(self._next_numbers) <= self._max_expiries:
            return False
        first = self.first
        self.on_received(self._next_numbers.popleft())
        return self.first > first

    def frames(self) -> list[list[bytes]]:
        """Those that are kept."""
        return list(self._frames)

    def status(self) -> Retained:
        """The messages about them for the receiver."""
        return Retained(first=self.first, next=self.next)

    def retained_due(self) -> Retained | None:
        """To be asked regularly: what to say if nothing has arrived since the last time."""
        stands = bool(self._frames) and self._first_before == self.first
        self._first_before = self.first if self._frames else 0
        return self.status() if stands else None


class IncomingLink:
    """What one inbox receives from one stage, of which another process may speak at any time."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._next = 0  # 0: no frame of this process has come, nor word of which is the first
        self._frames = self._bytes = 0  # since the last word
        self._requested, self._requested_at = -1, 0.0  # from where on, when

    def is_current(self, incarnation: int) -> bool:
        """False for a process that is older than another that was met."""
        if incarnation > self._incarnation:
            self._incarnation = incarnation
            self._next, self._requested = 0, -1
        return incarnation == self._incarnation

    def accepts(self, number: int, size: int) -> bool:
        """Whether frame `number`, of `size` bytes, is for the stage."""
        if number != (self._next or 1):
            return False
        self._next = number + 1
        self._frames += 1
        self._bytes += size
        return True

    def report_due(self, number: int, now: float) -> Received | None:
        """What to say after frame `number` came, at `now` (seconds)."""
        if number >= self._next:
            return self._ask(now)
        if self._frames < REPORT_FRAMES and self._bytes < REPORT_BYTES:
            return None
        return self._received(missing=False)

    def on_retained(self, retained: Retained, now: float) -> Received:
        """What to say to the sender of `retained`, which was sent behind all before
        `retained.next`."""
        self._next = max(self._next, retained.first)
        asked = self._ask(now) if self._next < retained.next else None
        return asked or self._received(missing=False)

    def _ask(self, now: float) -> Received | None:
        if self._requested == self._next and now - self._requested_at < RETRY_SECONDS:
            return None
        self._requested, self._requested_at = self._next, now
        return self._received(missing=True)

    def _received(self, missing: bool) -> Received:
        self._frames = self._bytes = 0
        return Received(incarnation=self._incarnation, next=self._next, missing=missing)


class ReliableLinks:
    """All links of one process: frames that it sends to the stages `far`, and that it receives of
    any of `stages`.

    `send(stage, message)` sends a message of this channel, `push(stage, parts)` a frame once more;
    `drop(stage)` is called when frames of a stage are dropped, after so much `max_expiries`
    (Outgoing). repeated: how many frames were pushed.
    """

    def __init__(
        self,
        incarnation: int,
        stages: frozenset[str],
        far: frozenset[str],
        send: Callable[[str, Message], object],
        push: Callable[[str, list[bytes]], object],
        drop: Callable[[str], object],
        resend_seconds: int = 1 << 30,
    ) -> None:
        self.repeated = 0
        self._incarnation = incarnation
        self._stages = stages
        self._send, self._push, self._drop = send, push, drop
        self._out = {stage: OutgoingLink(resend_seconds) for stage in far}
        self._in: dict[str, IncomingLink] = {}

    def outgoing(self, stage: str) -> OutgoingLink | None:
        """What is sent to that inbox; None where no connection is lost but with a process."""
        return self._out.get(stage)

    def accepts(self, sender: str, incarnation: int, number: int, size: int, now: float) -> bool:
        """Whether the frame that `sender` numbered so, of `size` bytes, is for the stage."""
        if sender not in self._stages:  # there is no way to it
            return True
        incoming = self._incoming(sender)
        if not incoming.is_current(incarnation):  # the fence must know that it is late
            return True
        passes = incoming.accepts(number, size)
        self._send_if(sender, incoming.report_due(number, now))
        return passes

    def on_message(self, sender: str, incarnation: int, message: Message, now: float) -> None:
        """Takes a message of this channel from a process of the stage `sender`."""
        if sender in self._stages:
            self._handlers[type(message)](self, sender, incarnation, message, now)

    def on_timer(self) -> None:
        """Asks after frames that are kept; to be called regularly."""
        for stage, outgoing in self._out.items():
            if outgoing.expire():
                self._drop(stage)
            self._send_if(stage, outgoing.retained_due())

    def _incoming(self, stage: str) -> IncomingLink:
        return self._in.get(stage) or self._in.setdefault(stage, IncomingLink())

    def _send_if(self, stage: str, message: Message | None) -> None:
        if message is not None:
            self._send(stage, message)

    def _on_retained(self, sender: str, incarnation: int, retained: Retained, now: float) -> None:
        incoming = self._incoming(sender)
        if incoming.is_current(incarnation):
            self._send(sender, incoming.on_retained(retained, now))

    def _on_received(self, sender: str, _incarnation: int, received: Received, _now: float) -> None:
        outgoing = self._out.get(sender)
        if outgoing is None or received.incarnation != self._incarnation:
            return
        outgoing.on_received(received.next)
        if received.missing and received.next < outgoing.first:
            self._send(sender, outgoing.status())
        elif received.missing:
            for parts in outgoing.frames():
                self.repeated += 1
                self._push(sender, parts)

    _handlers: ClassVar[dict[type[Message], Callable[..., None]]] = {
        Retained: _on_retained,
        Received: _on_received,
    }

"""The data that passes between two processes, without their sockets: frames, and links that lose
none.

A message becomes [channel, header, body], typed by channel, MessagePack throughout. A frame that
does not decode, or whose packed arrays are inconsistent (no whole items, or rows of different
lengths), raises BadFrame, which names channel and sender; a message that cannot be encoded raises
Unencodable. messages.py declares which fields are arrays.

ZeroMQ opens a TCP connection again that was reset, but data in flight is gone. So frames to an
inbox are numbered from 1 and kept until the receiver has them; a receiver that misses some asks for
them, and drops later frames until they have come: each frame passes once, in order, as long as both
processes live ("go back N"). ReliableLinks knows no message but its own two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import ClassVar, NamedTuple, Union

import msgspec
from msgspec import inspect

from pipeinfer import control
from pipeinfer.messages import CHANNELS, PROTOCOL, Admitted, Message, Plan, Result

LINK_CHANNEL = "link"
# Frames and bytes received after which the receiver sends the next Received.
REPORT_FRAMES = 64
REPORT_BYTES = 1 << 20
# seconds between two requests for the same frames; on a slow link repeated frames queue behind
# frames that are dropped
RETRY_SECONDS = 5.0


class Received(Message, frozen=True):
    """Receiver -> sender, its process `incarnation`: an acknowledgement of frames.

    Attributes:
    - next: all frames before this number have come; 0: the number of the first frame is not known
    - missing: frames from `next` on are to be sent once more
    """

    incarnation: int
    next: int
    missing: bool


class Retained(Message, frozen=True):
    """Sender -> receiver: the unacknowledged frames.

    Attributes:
    - first: number of the oldest frame that is kept
    - next: number of the next frame; those before have been sent
    """

    first: int
    next: int


LINK_MESSAGES = Union[Received, Retained]


class OutgoingLink:
    """The frames that one process sends to one inbox, until they are acknowledged.

    Attributes:
    - first: number of the oldest frame that is kept
    - next: number of the next frame to be sent
    - max_expiries: calls of `expire` that a frame outlives without being acknowledged; then it is
      dropped, because the receiver's host does not come back
    """

    def __init__(self, max_expiries: int = 1 << 30) -> None:
        self.first = self.next = 1
        self._frames: deque[list[bytes]] = deque()
        self._first_before = 0  # `first` at the last call of `retained_due`; 0: no frame was kept
        self._max_expiries = max_expiries
        self._next_numbers: deque[int] = deque()  # values of `next` at the latest calls of `expire`

    def append(self, parts: list[bytes]) -> None:
        """Adds the next frame, which was sent."""
        self._frames.append(parts)
        self.next += 1

    def on_received(self, until: int) -> None:
        """Drops frames before `until`, which were acknowledged."""
        while self.first < min(until, self.next):
            self._frames.popleft()
            self.first += 1

    def expire(self) -> bool:
        """Drops frames that were not acknowledged for too long; True if there were any. To be
        called regularly."""
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
        """The unacknowledged frames."""
        return list(self._frames)

    def status(self) -> Retained:
        """The message to the receiver about these frames."""
        return Retained(first=self.first, next=self.next)

    def retained_due(self) -> Retained | None:
        """The message to the receiver if no acknowledgement came since the last call, else None. To
        be called regularly."""
        stands = bool(self._frames) and self._first_before == self.first
        self._first_before = self.first if self._frames else 0
        return self.status() if stands else None


class IncomingLink:
    """The frames that one inbox receives from one stage, whose process may change at any time."""

    def __init__(self) -> None:
        self._incarnation = 0
        # 0: no frame of this process has come, and the number of the first is not known
        self._next = 0
        self._frames = self._bytes = 0  # since the last Received
        # number of the first frame that was asked for, and when
        self._requested, self._requested_at = -1, 0.0

    def is_current(self, incarnation: int) -> bool:
        """Whether the process `incarnation` is the newest one of the stage so far. A newer process
        than before resets the link."""
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
        """The message to the sender after frame `number` came, at `now` (seconds); None: not
        yet."""
        if number >= self._next:
            return self._ask(now)
        if self._frames < REPORT_FRAMES and self._bytes < REPORT_BYTES:
            return None
        return self._received(missing=False)

    def on_retained(self, retained: Retained, now: float) -> Received:
        """The answer to `retained`, which was sent after all frames before `retained.next`."""
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
    """All links of one process: frames that it sends to the stages `far`, and that it receives from
    any of `stages`.

    - send: `send(stage, message)` sends a message of this channel
    - push: `push(stage, parts)` sends a frame once more
    - drop: `drop(stage)` is called when frames to a stage have expired
    - resend_seconds: OutgoingLink.max_expiries, calls of `on_timer`

    Attributes:
    - repeated: number of frames that were pushed
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
        """The frames sent to that inbox; None if its connection cannot be lost while both processes
        live."""
        return self._out.get(stage)

    def accepts(self, sender: str, incarnation: int, number: int, size: int, now: float) -> bool:
        """Whether the frame that `sender` gave this `number`, of `size` bytes, is for the stage."""
        if sender not in self._stages:  # there is no link back to the sender
            return True
        incoming = self._incoming(sender)
        if not incoming.is_current(incarnation):  # passed on, so that the stage answers with Fenced
            return True
        passes = incoming.accepts(number, size)
        self._send_if(sender, incoming.report_due(number, now))
        return passes

    def on_message(self, sender: str, incarnation: int, message: Message, now: float) -> None:
        """Takes a message of this channel from a process of the stage `sender`."""
        if sender in self._stages:
            self._handlers[type(message)](self, sender, incarnation, message, now)

    def on_timer(self) -> None:
        """Asks receivers about frames that are kept; to be called regularly."""
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


# By message: names of the arrays that have an item for each row.
ROWS: dict[type, tuple[str, ...]] = {
    Plan: ("slots", "counts"),
    Admitted: ("slots", "cached"),
    Result: ("slots", "starts", "counts", "produced"),
}


class _Arrays(NamedTuple):
    """Declarations of the arrays in structs of one `kind`.

    Attributes:
    - own: (name, bytes of an item)
    - rows: names of arrays of one length
    - inner: (name, whether the field holds several, their arrays) of fields that hold such structs
    """

    kind: type
    own: tuple[tuple[str, int], ...]
    rows: tuple[str, ...]
    inner: tuple[tuple[str, bool, _Arrays], ...]

    def trouble(self, values: Sequence[object]) -> str:
        """The first error in the arrays of `values`, structs of this kind; "" if there is none."""
        # Hot path, once for every token of every stream: field by field, so that rows cost little.
        for name, size in self.own:
            for raw in map(attrgetter(name), values):
                if raw and len(raw) % size:
                    return f"{len(raw)} bytes of {name} are no whole number of {size}"
        for value in values if self.rows else ():
            lengths = [len(getattr(value, name)) for name in self.rows]
            if lengths.count(lengths[0]) != len(lengths):
                return f"{', '.join(self.rows)} have {', '.join(map(str, lengths))} bytes"
        for name, several, arrays in self.inner:
            held = [one for one in map(attrgetter(name), values) if one is not None]
            if several:
                held = list(chain.from_iterable(held))
            if held and (wrong := arrays.trouble(held)):
                return f"{name}: {wrong}"
        return ""


def _arrays(info: inspect.StructType) -> _Arrays | None:
    """The arrays of a struct; None if there are none, however deep."""
    own: list[tuple[str, int]] = []
    inner: list[tuple[str, bool, _Arrays]] = []
    for field in info.fields:
        for part in _parts(field.type):
            declared: dict[str, int] | None = getattr(part, "extra", None)  # of an annotated type
            size = (declared or {}).get("item_bytes", 0)
            several = isinstance(part, inspect.VarTupleType)
            held = part.item_type if isinstance(part, inspect.VarTupleType) else part
            if size:
                own.append((field.name, size))
            elif isinstance(held, inspect.StructType):
                arrays = _arrays(held)
                if arrays is not None:
                    inner.append((field.name, several, arrays))
    kind = info.cls
    return _Arrays(kind, tuple(own), ROWS.get(kind, ()), tuple(inner)) if own or inner else None


def _parts(info: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types of a union; of any other type, the type itself."""
    return info.types if isinstance(info, inspect.UnionType) else (info,)


ArrayCheck = Callable[[Sequence[object]], str]


def array_checks(kinds: Iterable[object]) -> dict[type, ArrayCheck]:
    """By message type with arrays: a function that returns the first error in several such
    messages, "" if there is none. `kinds`: the messages of each channel, as in messages.py."""
    found: dict[type, ArrayCheck] = {}
    for info in chain.from_iterable(_parts(inspect.type_info(kind)) for kind in kinds):
        arrays = _arrays(info) if isinstance(info, inspect.StructType) else None
        if arrays is not None:
            found[arrays.kind] = arrays.trouble
    return found


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """Second part of every frame: its sender, and its number on that sender's channel.

    Attributes:
    - link: number among all frames that this process sends to this inbox, from 1, if a connection
      may be lost while both processes live; else 0 (ReliableLinks)
    """

    protocol: int
    sender: str
    incarnation: int
    seq: int
    sent: float
    link: int = 0


# Errors of decoding: MsgspecError and text that is not UTF-8 are ValueErrors, a map whose keys
# cannot be keys is a TypeError, a date out of range an OverflowError, nesting a RecursionError.
DECODE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
# Most bytes of one part; the sender of a larger one is disconnected. The largest valid part is a
# request of --max-body-mib (32) as MessagePack, which may take 9 bytes for 4.
FRAME_BYTES = 256 << 20
# most bytes of a heartbeat or an answer on `control`, which has a few kilobytes
TELEMETRY_BYTES = 1 << 20

_encode = msgspec.msgpack.Encoder().encode
_header = msgspec.msgpack.Decoder(FrameHeader).decode
_types = {**CHANNELS, control.CHANNEL: control.CONTROL, LINK_CHANNEL: LINK_MESSAGES}
_decoders = {name: msgspec.msgpack.Decoder(types) for name, types in _types.items()}
_checks = array_checks(_types.values())


class BadFrame(ValueError):
    """A frame that this process cannot or must not read."""


class Unencodable(ValueError):
    """A message that cannot be sent: too deep, too large, or of values that MessagePack lacks."""


def encode(channel: str, header: FrameHeader, message: Message) -> list[bytes]:
    """The three parts of a frame; the first is also the topic of PUB/SUB. Raises Unencodable."""
    try:
        parts = [channel.encode(), _encode(header), _encode(message)]
    except Exception as error:  # the kind of error depends on the value that cannot be encoded
        text = f"{type(message).__name__}: {type(error).__name__}: {error}"
        raise Unencodable(text.encode("ascii", "backslashreplace").decode()) from None
    if len(parts[2]) > FRAME_BYTES:
        raise Unencodable(
            f"{type(message).__name__}: {len(parts[2])} bytes are more than {FRAME_BYTES}"
        )
    return parts


def decode(parts: list[bytes]) -> tuple[str, FrameHeader, Message]:
    """(channel, header, message) of a received frame; raises BadFrame."""
    if len(parts) != 3:
        raise BadFrame(f"a frame has 3 parts, not {len(parts)}")
    channel = parts[0].decode("utf-8", "replace")
    decoder = _decoders.get(channel)
    if decoder is None:
        raise BadFrame(f"unknown channel {channel!r}")
    try:
        header = _header(parts[1])
    except DECODE_ERRORS as error:
        raise BadFrame(f"channel {channel}: bad header: {error}") from None
    if header.protocol != PROTOCOL:
        raise BadFrame(
            f"channel {channel}: {header.sender} speaks protocol {header.protocol}, "
            f"this process {PROTOCOL}"
        )
    try:
        message = decoder.decode(parts[2])
    except DECODE_ERRORS as error:
        raise BadFrame(f"channel {channel}: bad message from {header.sender}: {error}") from None
    check = _checks.get(type(message))
    if check is not None and (trouble := check((message,))):
        kind = type(message).__name__
        raise BadFrame(f"channel {channel}: bad {kind} from {header.sender}: {trouble}")
    return channel, header, message

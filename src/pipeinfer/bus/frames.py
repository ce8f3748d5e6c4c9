"""Messages to frames and back: [channel, header, body], typed by channel, MessagePack throughout.

A frame that does not decode, or whose packed arrays do not hold together (whole items, and rows
that are all there), raises BadFrame, which names channel and sender; a message that has no frame
raises Unencodable. Which fields are arrays messages.py says. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import msgspec
from msgspec import inspect

from pipeinfer import control
from pipeinfer.bus import reliable
from pipeinfer.messages import CHANNELS, PROTOCOL, Admitted, Message, Plan, Result

# Arrays with an item for each row.
ROWS: dict[type, tuple[str, ...]] = {
    Plan: ("slots", "counts"),
    Admitted: ("slots", "cached"),
    Result: ("slots", "starts", "counts", "produced"),
}


class _Arrays(NamedTuple):
    """Of structs of one `kind`. own: (name, bytes of an item). rows: names of arrays of one length.
    inner: (name, whether it holds several, their arrays) of fields that hold such structs."""

    kind: type
    own: tuple[tuple[str, int], ...]
    rows: tuple[str, ...]
    inner: tuple[tuple[str, bool, _Arrays], ...]

    def trouble(self, values: Sequence[object]) -> str:
        """What is wrong with those of `values`; "" if nothing is."""
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
    """Those of a struct; None if there are none, however deep."""
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
    """The types of a union, or the one that it is."""
    return info.types if isinstance(info, inspect.UnionType) else (info,)


ArrayCheck = Callable[[Sequence[object]], str]


def array_checks(kinds: Iterable[object]) -> dict[type, ArrayCheck]:
    """By message, for those that have arrays: what says what is wrong with any of several such, ""
    if nothing is. `kinds`: of each channel the messages, as messages.py has them."""
    found: dict[type, ArrayCheck] = {}
    for info in chain.from_iterable(_parts(inspect.type_info(kind)) for kind in kinds):
        arrays = _arrays(info) if isinstance(info, inspect.StructType) else None
        if arrays is not None:
            found[arrays.kind] = arrays.trouble
    return found


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """Second part of every frame: who sent it, and its number on that sender's channel.

    link: its number among all that this process sends to this inbox, from 1, where a connection may
    be lost while both live; else 0 (bus/reliable.py).
    """

    protocol: int
    sender: str
    incarnation: int
    seq: int
    sent: float
    link: int = 0


# What decoding raises: MsgspecError and text that is not UTF-8 are ValueErrors, a map whose keys
# cannot be keys is a TypeError, a date out of range an OverflowError, nesting a RecursionError.
DECODE_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
# Bytes of one part; a larger one cannot be right, and its sender is disconnected. The largest
# that is: a request of --max-body-mib (32) as MessagePack, which may take 9 bytes for 4.
FRAME_BYTES = 256 << 20
TELEMETRY_BYTES = 1 << 20  # the same for a heartbeat or an answer on `control`: a few kilobytes

_encode = msgspec.msgpack.Encoder().encode
_header = msgspec.msgpack.Decoder(FrameHeader).decode
_types = {**CHANNELS, control.CHANNEL: control.CONTROL, reliable.CHANNEL: reliable.LINK}
_decoders = {name: msgspec.msgpack.Decoder(types) for name, types in _types.items()}
_checks = array_checks(_types.values())


class BadFrame(ValueError):
    """A frame that this process cannot or must not read."""


class Unencodable(ValueError):
    """A message that cannot be sent: too deep, too large, or of values that MessagePack lacks."""


def encode(channel: str, header: FrameHeader, message: Message) -> list[bytes]:
    """Three parts; the first is also the topic of PUB/SUB. Raises Unencodable."""
    try:
        parts = [channel.encode(), _encode(header), _encode(message)]
    except Exception as error:  # of as many kinds as there are values that cannot travel
        text = f"{type(message).__name__}: {type(error).__name__}: {error}"
        raise Unencodable(text.encode("ascii", "backslashreplace").decode()) from None
    if len(parts[2]) > FRAME_BYTES:
        raise Unencodable(
            f"{type(message).__name__}: {len(parts[2])} bytes are more than {FRAME_BYTES}"
        )
    return parts


def decode(parts: list[bytes]) -> tuple[str, FrameHeader, Message]:
    """(channel, header, message) of a received frame, or BadFrame."""
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

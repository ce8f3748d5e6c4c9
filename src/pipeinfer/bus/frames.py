"""Messages to frames and back: [channel, header, body], typed by channel, MessagePack throughout.

Knows no sockets. A frame that does not decode, or whose arrays do not hold together, raises
BadFrame, which names channel and sender; a message that has no frame raises Unencodable.
"""

from __future__ import annotations

import msgspec

from pipeinfer import control
from pipeinfer.bus import links, packed
from pipeinfer.channels import CHANNELS
from pipeinfer.messages import PROTOCOL, Message


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Second part of every frame: who sent it, and its number on that sender's channel.

    link: its number among all that this process sends to this inbox, from 1, where a connection may
    be lost while both live; else 0 (bus/links.py).
    """

    protocol: int
    sender: str
    incarnation: int
    seq: int
    sent: float
    link: int = 0


# What decoding raises: MsgspecError and text that is not UTF-8 are ValueErrors, a map whose keys
# cannot be keys is a TypeError, a date out of range an OverflowError, nesting a RecursionError.
UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError, MemoryError)
# Bytes of one part; a larger one cannot be right, and whoever sends it is disconnected. The largest
# that is: a request of --max-body-mib (32) as MessagePack, which may take 9 bytes for 4.
FRAME_BYTES = 256 << 20
TELEMETRY_BYTES = 1 << 20  # the same for a heartbeat or an answer on `control`: a few kilobytes

_encode = msgspec.msgpack.Encoder().encode
_header = msgspec.msgpack.Decoder(Header).decode
_types = {**CHANNELS, control.CHANNEL: control.CONTROL, links.CHANNEL: links.LINK}
_decoders = {name: msgspec.msgpack.Decoder(types) for name, types in _types.items()}
_checks = packed.checks(_types.values())


class BadFrame(ValueError):
    """A frame that this process cannot or must not read."""


class Unencodable(ValueError):
    """A message that cannot be sent: too deep, too large, or of values that MessagePack lacks."""


def encode(channel: str, header: Header, message: Message) -> list[bytes]:
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


def decode(parts: list[bytes]) -> tuple[str, Header, Message]:
    """(channel, header, message) of a received frame, or BadFrame."""
    if len(parts) != 3:
        raise BadFrame(f"a frame has 3 parts, not {len(parts)}")
    channel = parts[0].decode("utf-8", "replace")
    decoder = _decoders.get(channel)
    if decoder is None:
        raise BadFrame(f"unknown channel {channel!r}")
    try:
        header = _header(parts[1])
    except UNREADABLE as error:
        raise BadFrame(f"channel {channel}: bad header: {error}") from None
    if header.protocol != PROTOCOL:
        raise BadFrame(
            f"channel {channel}: {header.sender} speaks protocol {header.protocol}, "
            f"this process {PROTOCOL}"
        )
    try:
        message = decoder.decode(parts[2])
    except UNREADABLE as error:
        raise BadFrame(f"channel {channel}: bad message from {header.sender}: {error}") from None
    check = _checks.get(type(message))
    if check is not None and (trouble := check((message,))):
        kind = type(message).__name__
        raise BadFrame(f"channel {channel}: bad {kind} from {header.sender}: {trouble}")
    return channel, header, message

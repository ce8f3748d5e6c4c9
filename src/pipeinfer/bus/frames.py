"""Messages to frames and back: [channel, header, body], typed by channel, MessagePack throughout.

Knows no sockets. A frame that does not decode raises BadFrame, which names channel and sender.
"""

from __future__ import annotations

import msgspec

from pipeinfer import control
from pipeinfer.messages import CHANNELS, PROTOCOL, Message


class Header(msgspec.Struct, frozen=True, array_like=True):
    """First part of every frame: who sent it, and its number on that sender's channel."""

    protocol: int
    sender: str
    incarnation: int
    seq: int
    sent: float


# What decoding raises; the last one for text that is not UTF-8.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)

_encode = msgspec.msgpack.Encoder().encode
_header = msgspec.msgpack.Decoder(Header).decode
_decoders = {
    name: msgspec.msgpack.Decoder(types)
    for name, types in {**CHANNELS, control.CHANNEL: control.CONTROL}.items()
}


class BadFrame(ValueError):
    """A frame that this process cannot or must not read."""


def encode(channel: str, header: Header, message: Message) -> list[bytes]:
    """Three parts; the first is also the topic of PUB/SUB."""
    return [channel.encode(), _encode(header), _encode(message)]


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
        return channel, header, decoder.decode(parts[2])
    except UNREADABLE as error:
        raise BadFrame(f"channel {channel}: bad message from {header.sender}: {error}") from None

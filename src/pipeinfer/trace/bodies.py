"""The messages that may stand in a trace, by stage, direction and channel.

Bus messages are those of channels.py; what is local to a stage is named here and imported when a
trace of that stage is read. Knows no file.
"""

from __future__ import annotations

import importlib
from typing import Any, Union

import msgspec

from pipeinfer import events
from pipeinfer.bus.frames import UNREADABLE
from pipeinfer.channels import CHANNELS
from pipeinfer.core import LOCAL
from pipeinfer.messages import Heartbeat, Message
from pipeinfer.trace.format import Record, UnreadableTrace
from pipeinfer.trace.notes import Crash, End, StepNote, Unencoded

COMMON = ("Tick", "Drain", "Leave", "Unsent")  # of events.py, taken by every core
LOCAL_IN = {
    "gateway": ("pipeinfer.gateway.events:Call", "pipeinfer.gateway.events:Hangup"),
    "tokenizer": (
        "pipeinfer.tokenizer.core:Encoded",
        "pipeinfer.tokenizer.core:EncodeNext",
        "pipeinfer.tokenizer.core:Tried",
    ),
    "engine": (
        "pipeinfer.events:StepDone",
        "pipeinfer.events:Compiled",
        "pipeinfer.events:NewEpoch",
        "pipeinfer.events:GraphDue",
        "pipeinfer.engine.core:StepFailed",
    ),
}
LOCAL_OUT = {
    "gateway": tuple(
        f"pipeinfer.gateway.events:{name}"
        for name in ("Started", "Delta", "Failed", "StatusChanged")
    ),
    "tokenizer": (
        "pipeinfer.tokenizer.core:Encode",
        "pipeinfer.tokenizer.core:EncodeNext",
        "pipeinfer.tokenizer.core:Try",
    ),
    "engine": ("pipeinfer.engine.core:Compile", "pipeinfer.engine.core:Capture"),
}


class Bodies:
    """Decodes the bodies of one stage's records; `stage` is its name ("engine")."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._decoders: dict[tuple[str, str], msgspec.msgpack.Decoder[Any]] = {}

    def decode(self, record: Record) -> Message:
        """The typed message. Raises UnreadableTrace."""
        key = (record.direction, record.channel)
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = msgspec.msgpack.Decoder(self._types(*key))
        try:
            return decoder.decode(record.body)
        except UNREADABLE as error:
            raise UnreadableTrace(
                f"record {record.seq} ({record.direction} {record.channel}): {error}"
            ) from None

    def _types(self, direction: str, channel: str) -> Any:
        if direction == "note":
            return Union[StepNote, Unencoded, Crash, End, Heartbeat]
        if channel != LOCAL:
            if channel not in CHANNELS:
                raise UnreadableTrace(f"there is no channel {channel!r}")
            return Union[CHANNELS[channel], Unencoded] if direction == "out" else CHANNELS[channel]
        if direction == "in":
            common = [getattr(events, name) for name in COMMON]
            own = [_named(name) for name in LOCAL_IN.get(self._stage, ())]
            # A gateway hears itself without a socket.
            return Union[tuple(common + own + [Heartbeat] * (self._stage == "gateway"))]
        names = LOCAL_OUT.get(self._stage)
        if not names:
            raise UnreadableTrace(f"a {self._stage} has no local outputs")
        return Union[(Unencoded, *(_named(name) for name in names))]


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)

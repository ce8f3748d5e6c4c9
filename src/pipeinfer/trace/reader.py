"""Reads a trace file: its header at once, its records one after the other, and their messages.

A file that a killed process left is read up to its last whole block. Bus messages are those of
messages.py; local events of a stage are named here, and imported when a trace of that stage is
read.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Union

import msgspec

from pipeinfer import core
from pipeinfer.bus.frames import DECODE_ERRORS
from pipeinfer.core import LOCAL
from pipeinfer.messages import CHANNELS, PROTOCOL, Heartbeat, Message
from pipeinfer.trace import format as form
from pipeinfer.trace.format import OtherProtocol, Record, TraceHeader, UnreadableTrace
from pipeinfer.trace.notes import Crash, End, StepNote, Unencoded

COMMON_MESSAGES = ("Tick", "Drain", "Leave", "Unsent")  # of core.py, taken by every core
LOCAL_IN = {
    "gateway": ("pipeinfer.gateway.ledger:Call", "pipeinfer.gateway.ledger:Hangup"),
    "tokenizer": (
        "pipeinfer.tokenizer.core:Encoded",
        "pipeinfer.tokenizer.core:EncodeNext",
        "pipeinfer.tokenizer.core:GrammarVerdict",
    ),
    "engine": (
        "pipeinfer.core:StepDone",
        "pipeinfer.core:Compiled",
        "pipeinfer.core:NewEpoch",
        "pipeinfer.core:GraphDue",
        "pipeinfer.engine.core:StepFailed",
    ),
}
LOCAL_OUT = {
    "gateway": tuple(
        f"pipeinfer.gateway.ledger:{name}"
        for name in ("Started", "OutputDelta", "Failed", "StatusChanged")
    ),
    "tokenizer": (
        "pipeinfer.tokenizer.core:Encode",
        "pipeinfer.tokenizer.core:EncodeNext",
        "pipeinfer.tokenizer.core:ValidateGrammar",
    ),
    "engine": ("pipeinfer.engine.core:Compile", "pipeinfer.engine.core:Capture"),
}


class RecordDecoder:
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
        except DECODE_ERRORS as error:
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
            common = [getattr(core, name) for name in COMMON_MESSAGES]
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


class Trace:
    """A trace file.

    Iterate over it for its records, as often as you like. `truncated` is known after that: "" for a
    whole file, else where it breaks off. `message(record)` decodes a body.
    """

    def __init__(self, path: str | Path, any_protocol: bool = False) -> None:
        """Reads the header. Raises UnreadableTrace, or OtherProtocol unless `any_protocol`."""
        self.path = Path(path)
        self.truncated = ""
        with self._open() as file:
            try:
                payload = _payload(file)
                if payload is None:
                    raise UnreadableTrace("it ends within its header")
                self.header: TraceHeader = form.unpack_header(
                    payload, None if any_protocol else PROTOCOL
                )
            except UnreadableTrace as error:
                raise type(error)(f"{self.path}: {error}") from None
            self._begin = file.tell()
        self._bodies = RecordDecoder(self.header.name)

    def __iter__(self) -> Iterator[Record]:
        """The records in order. Raises UnreadableTrace at a block that is damaged."""
        self.truncated = ""
        seq = block = 0
        with self._open() as file:
            file.seek(self._begin)
            while True:
                at = file.tell()
                try:
                    payload = _payload(file)
                    records = form.unpack_records(payload) if payload else ()
                except UnreadableTrace as error:
                    where = f"{self.path}: block {block} at byte {at}"
                    raise UnreadableTrace(f"{where}: {error}") from None
                if payload is None:
                    self.truncated = f"block {block} at byte {at} is not whole"
                    return
                if not payload:
                    return
                for record in records:
                    record.seq = seq
                    seq += 1
                    yield record
                block += 1

    def message(self, record: Record) -> Message:
        """The record's body, typed. Raises UnreadableTrace if it is none of its channel's."""
        try:
            return self._bodies.decode(record)
        except UnreadableTrace as error:
            raise UnreadableTrace(f"{self.path}: {error}") from None

    def _open(self) -> IO[bytes]:
        try:
            file = self.path.open("rb")
        except OSError as error:
            raise UnreadableTrace(f"{self.path}: {error.strerror}") from None
        if file.read(len(form.MAGIC)) != form.MAGIC:
            file.close()
            raise UnreadableTrace(f"{self.path}: this is no pipeinfer trace")
        return file


def _payload(file: IO[bytes]) -> bytes | None:
    """The next block's payload: b"" at the end of the file, None where it breaks off."""
    prefix = file.read(form.PREFIX.size)
    if not prefix:
        return b""
    if len(prefix) < form.PREFIX.size:
        return None
    length, crc = form.PREFIX.unpack(prefix)
    if not 0 < length <= form.MAX_BLOCK_BYTES:
        raise UnreadableTrace(f"a block of {length} bytes")
    payload = file.read(length)
    return form.checked(payload, crc) if len(payload) == length else None


__all__ = ["OtherProtocol", "Record", "Trace", "TraceHeader", "UnreadableTrace"]

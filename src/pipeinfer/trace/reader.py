"""Reads a trace file: its header at once, its records one after the other.

Knows the format and no stage. A file that a killed process left is read up to its last whole block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pipeinfer.messages import PROTOCOL, Message
from pipeinfer.trace import format as form
from pipeinfer.trace.bodies import Bodies
from pipeinfer.trace.format import OtherProtocol, Record, TraceHeader, UnreadableTrace


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
        self._bodies = Bodies(self.header.name)

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
    if not 0 < length <= form.LARGEST:
        raise UnreadableTrace(f"a block of {length} bytes")
    payload = file.read(length)
    return form.checked(payload, crc) if len(payload) == length else None


__all__ = ["OtherProtocol", "Record", "Trace", "TraceHeader", "UnreadableTrace"]

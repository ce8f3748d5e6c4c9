"""One recording: a trace file that takes blocks of records until it is told to end or reaches a
limit; its name and folder, and the identity of the checkpoint that the stage had.

Used by the recorder's thread alone. Files are for their owner alone (0600), because prompts stand
in them. Knows no loop and no stage.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from pipeinfer.core import LOCAL
from pipeinfer.gguf.header import is_gguf
from pipeinfer.trace import format as form
from pipeinfer.trace.format import ModelIdentity, Row, TraceHeader
from pipeinfer.trace.notes import End

SUFFIX = ".pitrace"
FLIGHT_PREFIX = "flight-"
MAX_FLIGHT_RECORDINGS = (
    32  # flight recordings in a folder; a stage that dies again and again must not fill the disk
)


class TraceFile:
    """A new file `DIR/STEM.pitrace`, or `STEM-2`, `STEM-3` ... where there is one already."""

    def __init__(self, folder: str | Path, stem: str) -> None:
        """Creates the folder and the file. Raises OSError."""
        folder = Path(folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.bytes = 0
        number = 1
        while True:
            self.path = folder / (stem + (f"-{number}" if number > 1 else "") + SUFFIX)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o600)
                return
            except FileExistsError:
                number += 1

    def write(self, block: bytes) -> None:
        """Hands the block to the kernel, where it survives this process. Raises OSError."""
        left = memoryview(block)
        while left:
            left = left[os.write(self._descriptor, left) :]
        self.bytes += len(block)

    def close(self) -> None:
        os.close(self._descriptor)


def default_folder() -> Path:
    """Where flight recordings go if nobody says otherwise: XDG's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pipeinfer"


def prune_flight_recordings(folder: Path) -> None:
    """Removes the oldest flight recordings of `folder` beyond KEPT. Raises OSError."""
    found = sorted(folder.glob(f"{FLIGHT_PREFIX}*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    for path in found[:-MAX_FLIGHT_RECORDINGS]:
        path.unlink(missing_ok=True)


MAX_SAFETENSORS_HEADER = 100 << 20  # bytes; what safetensors itself allows
MAX_GGUF_HEADER = 16 << 20  # bytes; with it a large vocabulary


def identify_model(name: str, folder: str) -> ModelIdentity:
    """The identity of the checkpoint in `folder`; digest "" if it has no readable config.json.

    `folder` may be a GGUF file."""
    try:
        return ModelIdentity(name, folder, _digest(Path(folder)))
    except OSError:
        return ModelIdentity(name, folder)  # the stages that need the files say what is wrong


def _digest(folder: Path) -> str:
    if is_gguf(folder):
        return _header_digest(folder)
    total = sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        total.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            prefix = file.read(8)
            size = (
                min(struct.unpack("<Q", prefix)[0], MAX_SAFETENSORS_HEADER)
                if len(prefix) == 8
                else 0
            )
            total.update(file.read(size))
    return total.hexdigest()


def _header_digest(file: Path) -> str:
    """Of size and first bytes: there are key-values, vocabulary and a list of tensors."""
    total = sha256(f"{file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        total.update(stream.read(MAX_GGUF_HEADER))
    return total.hexdigest()


log = logging.getLogger(__name__)

END_BYTES = 256  # kept free for the last note, so that a limit in bytes holds


class Rewriter(Protocol):
    """Makes other rows, and another header, of those that were recorded."""

    def row(self, row: Row) -> Row: ...

    def header(self, header: TraceHeader) -> TraceHeader: ...


@dataclass(frozen=True)
class Quota:
    """The limits after which a recording ends by itself; 0 is without limit."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """The state of a recording.

    name: of the recording. path: of its file. records, bytes: written so far.
    reason: why it ended or failed, "" while it goes on.
    """

    name: str
    state: Literal["recording", "done", "failed"]
    path: str
    records: int
    bytes: int
    reason: str = ""


class Recording:
    """Records into `folder` until a limit, `end`, or an error of the disk.

    rewriter: makes what rewrites the rows (redaction), when it is needed first; ValueError if it
    cannot. on_change: told at the beginning and at the end, on the calling thread.
    """

    def __init__(
        self,
        name: str,
        folder: str | Path,
        quota: Quota,
        on_change: Callable[[Outcome], None],
        rewriter: Callable[[], Rewriter] | None = None,
    ) -> None:
        self.name = name
        self.ended = False
        self._folder = folder
        self._quota = quota
        self._make_rewriter = rewriter
        self._rewriter: Rewriter | None = None
        self._on_change = on_change
        self._file: TraceFile | None = None
        self._packer = form.RecordPacker()
        self._records = 0

    def begin(self, stem: str, header: TraceHeader) -> None:
        """Creates the file `stem`.pitrace with its header."""
        try:
            if self._make_rewriter is not None:
                self._rewriter = self._make_rewriter()
                header = self._rewriter.header(header)
            block = form.pack_header(header)
            if self._quota.bytes and len(block) + END_BYTES > self._quota.bytes:
                self._settle("failed", f"its beginning alone takes {len(block)} bytes")
                return
            self._file = TraceFile(self._folder, stem)
            self._file.write(block)
        except OSError as error:
            self._settle("failed", f"{self._folder}: {error.strerror}")
            return
        except ValueError as error:  # a configuration, a key or a state that cannot be rewritten
            self._settle("failed", str(error))
            return
        log.info("recording into %s", self._file.path)
        self._on_change(self._outcome("recording"))

    def fail(self, reason: str) -> None:
        """It cannot begin."""
        self._settle("failed", reason)

    def take(self, rows: Sequence[Row], block: bytes | None) -> None:
        """The next rows, whole events; `block` has them packed already, None if nobody has."""
        if self.ended:
            return
        left = self._quota.messages - self._records if self._quota.messages else len(rows)
        full = bool(self._quota.messages) and left <= len(rows)
        if full:
            rows = rows[: _end_of_event(rows, left)]
        if full or self._rewriter is not None or block is None:
            if self._rewriter is not None:
                rows = [self._rewriter.row(row) for row in rows]
            block = self._packer.pack(rows)
        self._write(block, len(rows))
        if full:
            self.end("as many messages as were asked for")

    def end(self, reason: str, lost: int = 0) -> None:
        """Ends in good order, with a note. Does nothing when it has ended already."""
        if self.ended or self._file is None:
            return
        try:
            body = msgspec.msgpack.encode(End(reason, lost))
            self._file.write(form.pack_records([(0.0, "note", LOCAL, "", 0, 0.0, body)]))
        except OSError as error:
            self._settle("failed", str(error))
            return
        self._settle("done", reason)

    def _write(self, block: bytes, records: int) -> None:
        assert self._file is not None
        most = self._quota.bytes
        if most and self._file.bytes + len(block) + END_BYTES > most:
            self.end("as many bytes as were asked for")
            return
        try:
            self._file.write(block)
        except OSError as error:
            self._settle("failed", str(error))
            return
        self._records += records

    def _settle(self, state: Literal["done", "failed"], reason: str) -> None:
        self.ended = True
        outcome = self._outcome(state, reason)
        if self._file is not None:
            self._file.close()
        level = logging.INFO if state == "done" else logging.ERROR
        log.log(level, "recording %s: %s", outcome.path or self._folder, reason)
        self._on_change(outcome)

    def _outcome(self, state: Literal["recording", "done", "failed"], reason: str = "") -> Outcome:
        file = self._file
        path, size = (str(file.path), file.bytes) if file is not None else ("", 0)
        return Outcome(self.name, state, path, self._records, size, reason)


def _end_of_event(rows: Sequence[Row], count: int) -> int:
    """At least `count` rows, and all outputs of the last input among them."""
    for at in range(count, len(rows)):
        if rows[at][1] == "in":
            return at
    return len(rows)

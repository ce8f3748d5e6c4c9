"""The format of a trace file, and how one is read.

    PITRACE1 | block: the header | block: records | block: records ...
    block    = length u32 | CRC-32 of the payload u32 | payload: zstd of MessagePack

- `TraceHeader`, `Record`, `RecordPacker`: what the blocks hold; integers are little-endian
- `Unencoded`, `Crash`, `End`: notes, which are never fed to a core and never compared
- `Trace`: a file, its header at once, its records one after the other, and their messages. A file
  that a killed process left is read up to its last whole block. Messages of the bus are those of
  messages.py; local events of a stage are named here, and imported when a trace of that stage is
  read

Knows no clock. docs/recording.md is its page.
"""

from __future__ import annotations

import pkgutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Union

import msgspec
import zstandard

from pipeinfer import core
from pipeinfer.bus.frames import DECODE_ERRORS
from pipeinfer.core import LOCAL
from pipeinfer.messages import CHANNELS, PROTOCOL, Heartbeat, Message

MAGIC = b"PITRACE1"
PREFIX = struct.Struct("<II")  # length and CRC-32 of a block's payload
MAX_BLOCK_BYTES = 1 << 30  # bytes of a block, packed or not; more is no block
# Bytes that a block may expand to, for each that it has, and in any case. Recordings of sessions
# have 4 to 30; so a small file stays small in memory, even a hostile one. Behind what would expand
# to more (a text of one letter, a million times) there is padding.
RATIO, FLOOR = 200, 16 << 10
MAX_HEADER_DEPTH = 32  # of the settings and facts in a header, which are tables of plain values
LARGE_STATE = 1 << 20  # bytes
_MARK = b"here the state of the core begins"
LEVEL = -1  # of zstd: a quarter less time than 1 takes, for a twentieth more bytes

Direction = Literal["in", "out", "note"]


class UnreadableTrace(ValueError):
    """The file is no trace, or it is damaged; the text says where."""


class OtherProtocol(UnreadableTrace):
    """The trace was recorded with another version of the protocol."""


class ModelIdentity(msgspec.Struct, frozen=True):
    """Which checkpoint a stage had. `digest`: of config.json and of the weight files' headers and
    sizes, "" where there was none to read."""

    name: str = ""
    folder: str = ""
    digest: str = ""


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a trace: all that is needed to build the same stage again.

    Attributes:
    - stage: its id, e.g. "engine-0-0"
    - settings: all of Settings but api_key
    - stages: ids of the topology
    - wall, monotonic: seconds of both clocks at the beginning of the trace
    - facts: what the builder knows beyond the settings
    - snapshot: the core's state before the first record (trace/snapshot.py), None where the trace
      begins with a fresh core
    - error: of a flight recording, the exception that ended the stage
    - broken: records before the first one are missing, so that nothing can be replayed before a
      BeginEpoch
    """

    protocol: int
    version: str
    stage: str
    name: str
    group: int = 0
    rank: int = 0
    index: int = 0
    incarnation: int = 0
    pid: int = 0
    host: str = ""
    settings: dict[str, Any] = {}
    stages: tuple[str, ...] = ()
    model: ModelIdentity = ModelIdentity()
    seed: int = 0
    wall: float = 0.0
    monotonic: float = 0.0
    facts: dict[str, Any] = {}
    reason: Literal["record", "flight"] = "record"
    redacted: bool = False
    snapshot: bytes | None = None
    error: str = ""
    broken: bool = False


class Record(msgspec.Struct, array_like=True):
    """A message that a core took ("in") or gave ("out"), or a remark ("note").

    Attributes:
    - time: monotonic seconds; of an input exactly the `now` that its core was given
    - channel: of the bus, or "local"
    - peer: stage id of the sender or receiver, "" for everyone and for local ones
    - number, sent: the frame's FrameHeader.seq and FrameHeader.sent, 0 for local ones
    - body: the message as MessagePack (trace/format.py decodes it)
    - seq: its place in the file, set by the reader
    """

    time: float
    direction: Direction
    channel: str
    peer: str
    number: int
    sent: float
    body: bytes
    seq: int = 0


# The fields of Record without `seq`, as the hot path makes them.
Row = tuple[float, Direction, str, str, int, float, bytes]

_encode = msgspec.msgpack.Encoder().encode
_records = msgspec.msgpack.Decoder(list[Record]).decode
_header = msgspec.msgpack.Decoder(TraceHeader).decode


class _Version(msgspec.Struct):
    protocol: int


_version = msgspec.msgpack.Decoder(_Version).decode


class RecordPacker:
    """`pack(rows)` makes blocks of records, again and again in the same memory: that is a fifth of
    what a block costs. For one thread alone."""

    def __init__(self) -> None:
        self._compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self._encode = msgspec.msgpack.Encoder().encode

    def pack(self, rows: Sequence[Row]) -> bytes:
        """A block of records."""
        raw = self._encode(rows)
        return _block(_readable(self._compress(raw), raw))


def pack_records(rows: Sequence[Row]) -> bytes:
    """A block of records, for who has only one."""
    return RecordPacker().pack(rows)


def pack_header(header: TraceHeader) -> bytes:
    """The beginning of a file: the magic and the header's block."""
    state = header.snapshot or b""
    if len(state) < LARGE_STATE:
        raw = _encode(header)
        packed = zstandard.ZstdCompressor(level=LEVEL).compress(raw)
        return MAGIC + _block(_readable(packed, raw))
    # A large state goes past the encoder: that one would copy it while the stage's loop waits for
    # the interpreter; compressing does not hold it.
    with_mark = _encode(msgspec.structs.replace(header, snapshot=_MARK))
    before, _, after = with_mark.partition(b"\xc4" + bytes((len(_MARK),)) + _MARK)
    parts = (before, b"\xc6" + len(state).to_bytes(4, "big"), state, after)
    packer = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=sum(map(len, parts)))
    packed = _readable(b"".join([*map(packer.compress, parts), packer.flush()]), *parts)
    return b"".join((MAGIC, PREFIX.pack(len(packed), zlib.crc32(packed)), packed))


def pack_state(state: bytes) -> bytes:
    """A snapshot as one zstd frame."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(state)


def unpack_state(packed: bytes) -> bytes:
    """Unpacks a state that `pack_state` has packed."""
    return zstandard.ZstdDecompressor().decompress(packed)


def unpack_records(payload: bytes) -> list[Record]:
    """The records of a block's payload. Raises UnreadableTrace."""
    try:
        return _records(_decompressed(payload))
    except (*DECODE_ERRORS, zstandard.ZstdError) as error:
        raise UnreadableTrace(f"the records cannot be decoded: {error}") from None


def unpack_header(payload: bytes, protocol: int | None) -> TraceHeader:
    """Unpacks a trace's header. Raises UnreadableTrace, or OtherProtocol unless it is `protocol`
    (None: any)."""
    try:
        raw = _decompressed(payload)
        found = _version(raw).protocol
        header = _header(raw) if protocol in (None, found) else None
    except (*DECODE_ERRORS, zstandard.ZstdError) as error:
        raise UnreadableTrace(f"the header cannot be decoded: {error}") from None
    if header is None:
        raise OtherProtocol(
            f"it was recorded with protocol {found}, this pipeinfer speaks {protocol}"
        )
    if not _is_shallow([header.settings, header.facts]):
        raise UnreadableTrace(f"its header is nested more than {MAX_HEADER_DEPTH} deep")
    return header


def checked(payload: bytes, crc: int) -> bytes:
    """`payload` itself; UnreadableTrace if it is not what was written."""
    if zlib.crc32(payload) != crc:
        raise UnreadableTrace("the checksum differs")
    return payload


def _block(payload: bytes) -> bytes:
    return PREFIX.pack(len(payload), zlib.crc32(payload)) + payload


def _decompressed(payload: bytes) -> bytes:
    """At most what so many bytes may stand for, whatever they say of themselves."""
    max_bytes = _allowed(len(payload))
    size = zstandard.frame_content_size(payload)
    if size > max_bytes:
        raise UnreadableTrace(f"a block of {len(payload)} bytes that expands to {size}")
    # Where it does not say its size (-1), or another one, that is found out within `most`.
    return zstandard.ZstdDecompressor().decompress(payload, max_output_size=max_bytes)


def _allowed(packed: int) -> int:
    return min(RATIO * packed + FLOOR, MAX_BLOCK_BYTES)


def _readable(packed: bytes, *raw: bytes) -> bytes:
    """`packed`, with a frame behind it that readers skip (RFC 8878) if it would be too small."""
    padding = sum(map(len, raw)) // RATIO - len(packed)
    if padding <= 0:
        return packed
    return b"".join((packed, b"\x50\x2a\x4d\x18", padding.to_bytes(4, "little"), bytes(padding)))


def _is_shallow(value: Any) -> bool:
    """Whether containers lie in one another at most DEPTH deep."""
    level: list[Any] = [value]
    for _ in range(MAX_HEADER_DEPTH):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
            elif isinstance(one, (list, tuple)):
                inner += one
        if not inner:
            return True
        level = inner
    return False


class Unencoded(Message, frozen=True):
    """An output that has no encoding, or no receiver: its type's name."""

    kind: str


class Crash(Message, frozen=True):
    """The stage died here of an exception, most likely on the last input; "TypeError: ..."."""

    error: str


class End(Message, frozen=True):
    """The recording ended here, in order; `reason` says why. `lost`: records after it that could
    not be kept."""

    reason: str
    lost: int = 0


COMMON_MESSAGES = ("Tick", "Drain", "Leave", "SendFailed")  # of core.py, taken by every core
LOCAL_IN = {
    "gateway": (
        "pipeinfer.gateway.ledger:Call",
        "pipeinfer.gateway.ledger:ClientDisconnected",
        "pipeinfer.gateway.ledger:QueueShare",
        "pipeinfer.gateway.ledger:SetAdapters",
        "pipeinfer.messages:Reattached",
        "pipeinfer.messages:ResetCache",
        "pipeinfer.messages:SetSleep",
    ),
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
        "pipeinfer.engine.core:FoundPages",
        "pipeinfer.engine.core:Suspended",
        "pipeinfer.engine.core:Resumed",
        "pipeinfer.engine.core:AdapterRead",
    ),
}
LOCAL_OUT = {
    "gateway": (
        *(
            f"pipeinfer.gateway.ledger:{name}"
            for name in ("Started", "OutputDelta", "Failed", "AdoptionEnded", "StatusChanged")
        ),
        "pipeinfer.messages:AdapterChanges",
        "pipeinfer.messages:Adopt",
        "pipeinfer.messages:CacheReset",
    ),
    "tokenizer": (
        "pipeinfer.tokenizer.core:Encode",
        "pipeinfer.tokenizer.core:EncodeNext",
        "pipeinfer.tokenizer.core:ValidateGrammar",
    ),
    "engine": (
        *(
            f"pipeinfer.engine.core:{name}"
            for name in (
                "Compile",
                "Capture",
                "MarkPagesUnusable",
                "FindPages",
                "Suspend",
                "Resume",
            )
        ),
        "pipeinfer.messages:LoadAdapter",
    ),
}


class RecordDecoder:
    """Decodes the bodies of one stage's records; `stage` is its name ("engine")."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._decoders: dict[tuple[str, str], msgspec.msgpack.Decoder[Any]] = {}

    def decode(self, record: Record) -> Message:
        """Decodes the record into its typed message. Raises UnreadableTrace."""
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
            return Union[core.StepNote, core.PagesNote, Unencoded, Crash, End, Heartbeat]
        if channel != LOCAL:
            if channel not in CHANNELS:
                raise UnreadableTrace(f"there is no channel {channel!r}")
            return Union[CHANNELS[channel], Unencoded] if direction == "out" else CHANNELS[channel]
        if direction == "in":
            common = [getattr(core, name) for name in COMMON_MESSAGES]
            own = [pkgutil.resolve_name(name) for name in LOCAL_IN.get(self._stage, ())]
            # A gateway gets its own heartbeats without a socket.
            return Union[tuple(common + own + [Heartbeat] * (self._stage == "gateway"))]
        names = LOCAL_OUT.get(self._stage)
        if not names:
            raise UnreadableTrace(f"a {self._stage} has no local outputs")
        return Union[(Unencoded, *(pkgutil.resolve_name(name) for name in names))]


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
                self.header: TraceHeader = unpack_header(
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
                    records = unpack_records(payload) if payload else ()
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
        if file.read(len(MAGIC)) != MAGIC:
            file.close()
            raise UnreadableTrace(f"{self.path}: this is no pipeinfer trace")
        return file


def _payload(file: IO[bytes]) -> bytes | None:
    """The next block's payload: b"" at the end of the file, None where it breaks off."""
    prefix = file.read(PREFIX.size)
    if not prefix:
        return b""
    if len(prefix) < PREFIX.size:
        return None
    length, crc = PREFIX.unpack(prefix)
    if not 0 < length <= MAX_BLOCK_BYTES:
        raise UnreadableTrace(f"a block of {length} bytes")
    payload = file.read(length)
    return checked(payload, crc) if len(payload) == length else None


__all__ = ["OtherProtocol", "Record", "Trace", "TraceHeader", "UnreadableTrace"]

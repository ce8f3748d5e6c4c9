"""Trace files, damaged or made up: read to their end, their messages decoded, states restored.

An input is how to make a file: parts that become blocks, so that checksums and compression are
right and what lies behind them is reached, or the file's bytes as they are. Only UnreadableTrace
and RestoreError come out, and memory stays in relation to the file.
"""

from __future__ import annotations

import functools
import resource
import tempfile
import zlib
from pathlib import Path
from random import Random

import msgspec
import zstandard

from fuzz import cores, inputs
from fuzz.engines import Wrong
from pipeinfer.messages import PROTOCOL
from pipeinfer.runtime.stage import CORE_CHANNELS
from pipeinfer.trace import format as form
from pipeinfer.trace.format import Trace, TraceHeader, UnreadableTrace
from pipeinfer.trace.snapshot import RestoreError, restore, snapshot

RAW, PLAIN, PACKED, LARGE = range(4)  # a file, and blocks: of MessagePack, of zstd, of zeros
GROWTH, TIMES = 256 << 20, 400  # bytes of memory for a file, and for each of its bytes
SIZES = (*[2**10, 2**16, 2**20, 2**22] * 8, 2**26, 2**30, 2**30 + 1)  # large ones take long
_compress = zstandard.ZstdCompressor(level=1).compress


def make() -> Traces:
    """The target."""
    return Traces()


class Traces:
    """See Target."""

    instrumented = (
        "pipeinfer.trace.format", "pipeinfer.trace.format", "pipeinfer.trace.format",
        "pipeinfer.trace.snapshot",
    )  # fmt: skip

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pipeinfer-fuzz-", dir=_memory())
        self._file = Path(self._folder.name, "one.pitrace")

    def seeds(self) -> list[bytes]:
        """A trace of each stage, with a snapshot and a record of each message; one as it is."""
        source, found = Random(3), []
        for name in cores.STAGES:
            header = TraceHeader(
                protocol=PROTOCOL, version="0", stage=f"{name}-0", name=name,
                snapshot=snapshot(cores.fresh(name)),
            )  # fmt: skip
            rows = [
                (0.1, "in", channel, "gateway-0", 1, 0.0, inputs.encode(value))
                for channel in CORE_CHANNELS[name]
                for value in [inputs.example(channel, source)]
            ]
            blocks = [inputs.encode(header), inputs.encode(rows)]
            found.append(inputs.joined([bytes([PLAIN]) + block for block in blocks]))
        found.append(inputs.joined([bytes([RAW]) + _file_of(inputs.parts(found[0]))]))
        return found

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Other values in a block, another snapshot, or a block of another kind."""
        pieces = inputs.parts(data)
        if not pieces:
            return inputs.joined([bytes([PLAIN]) + b"\x90"])
        at, kind = source.randrange(len(pieces)), source.randrange(8)
        block = pieces[at][1:]
        if kind < 4:
            pieces[at] = bytes([PLAIN]) + _other_values(block, source)
        elif kind == 4:
            packed = _compress(block)
            pieces[at] = bytes([PACKED]) + inputs.mutated_bytes(packed, source)
        elif kind == 5:
            size = source.choice(SIZES)
            pieces.append(bytes([LARGE]) + size.to_bytes(4, "big"))
        elif kind == 6:
            pieces.append(source.choice(pieces))
        else:
            pieces[at] = bytes([source.randrange(4)]) + block
        return inputs.joined(pieces)

    def one(self, data: bytes) -> None:
        """Reads the file as the tools do."""
        content = _file_of(inputs.parts(data))
        self._file.write_bytes(content)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._read()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if grown > GROWTH + TIMES * len(content):
            raise Wrong(f"a file of {len(content)} bytes took {grown >> 20} MiB")

    def _read(self) -> None:
        try:
            trace = Trace(self._file, any_protocol=True)
        except UnreadableTrace:
            return
        if trace.header.snapshot is not None and trace.header.name in cores.STAGES:
            try:
                restore(cores.fresh(trace.header.name), trace.header.snapshot)
            except RestoreError as error:
                if not str(error):
                    raise Wrong("a RestoreError that says nothing") from None
        try:
            for record in trace:
                try:
                    trace.message(record)
                except UnreadableTrace:
                    continue
        except UnreadableTrace:
            return

    def close(self) -> None:
        """Removes the file."""
        self._folder.cleanup()


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _file_of(pieces: list[bytes]) -> bytes:
    """The file that an input describes."""
    if pieces and pieces[0][:1] == bytes([RAW]):
        return pieces[0][1:]
    blocks = []
    for piece in pieces:
        kind, block = (piece or b"\1")[0] % 4, piece[1:]
        payload = block
        if kind == PLAIN:
            payload = _compress(block)
        elif kind == LARGE:
            payload = _zeros(_size(int.from_bytes(block[:4], "big")))
        blocks.append(form.PREFIX.pack(len(payload), zlib.crc32(payload)) + payload)
    return form.MAGIC + b"".join(blocks)


def _size(said: int) -> int:
    """One of a few sizes, so that they are packed once."""
    return next((size for size in sorted(SIZES) if size >= said), max(SIZES))


@functools.cache
def _zeros(size: int) -> bytes:
    """So many zeros, packed, without holding them: a frame of zstd that says its size."""
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    step = bytes(1 << 20)
    full, rest = divmod(size, len(step))
    pieces = [packer.compress(step) for _ in range(full)]
    return b"".join([*pieces, packer.compress(step[:rest]), packer.flush()])


def _other_values(block: bytes, source: Random) -> bytes:
    """A header with other values or another snapshot, or other records."""
    try:
        value = msgspec.msgpack.decode(block)
        if isinstance(value, dict) and source.random() < 0.6:
            state = msgspec.msgpack.decode(value["snapshot"])
            value["snapshot"] = inputs.encode(inputs.mutated_value(state, source, inputs.raw))
            return inputs.encode(value)
        return inputs.encode(inputs.mutated_value(value, source, inputs.raw))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return inputs.mutated_bytes(block, source)

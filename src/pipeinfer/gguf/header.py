"""What a GGUF file says before its weights: key-values and a list of tensors, checked against its
size.

A value is made when somebody asks for it: a vocabulary is megabytes, and most readers want a few
numbers. Knows no architecture and reads no weights. Source: the format's document, see scalars.py.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pipeinfer.gguf.quantization import BLOCKS, TYPES
from pipeinfer.gguf.scalars import Cursor, InvalidFile, Value
from pipeinfer.gguf.values import quote
from pipeinfer.settings import ConfigurationError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DIMENSIONS = 4  # at most, of a tensor
MOST_VALUES = 1 << 48  # of a tensor: their bytes can be counted in 64 bits
LONGEST_NAME = 64  # bytes of a tensor's; llama.cpp's own bound
LEAST_PAIR = 8 + 4 + 1  # bytes of an empty key, a type and the smallest value
LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # of an empty name, one dimension, type and offset


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as it lies in the file.

    shape: slowest dimension first, as torch has it. type: "F32", "Q4_K" ...; offset: in bytes, from
    the file's begin.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class FileMetadata(Mapping[str, Value]):
    """The key-values; each access reads the file."""

    def __init__(self, path: Path, data: mmap.mmap, offsets: dict[str, tuple[int, int]]) -> None:
        """`offsets`: type and byte offset by key."""
        self._path = path
        self._data = data
        self._offsets = offsets

    def __getitem__(self, key: str) -> Value:
        kind, at = self._offsets[key]
        try:
            return Cursor(self._data, at).value(kind)
        except InvalidFile as error:
            raise ConfigurationError(f"{self._path}: {key}: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)


@dataclass(frozen=True)
class Header:
    """`tensors` by name."""

    path: Path
    metadata: FileMetadata
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def error(self, message: str) -> ConfigurationError:
        """To be raised: `message`, with the file in front."""
        return ConfigurationError(f"{self.path}: {message}")


def read_header(path: Path) -> Header:
    """The header of a file; ConfigurationError in one line if it is none, cut or lies."""
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # mmap does not take an empty file
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    try:
        return _read(path, data)
    except InvalidFile as error:
        raise ConfigurationError(f"{path} is a broken GGUF file: {error}") from None


def _read(path: Path, data: mmap.mmap) -> Header:
    if data[:4] != MAGIC:
        raise InvalidFile("it does not begin with GGUF")
    cursor = Cursor(data, 4)
    version = cursor.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
        order = ", big-endian" if swapped in VERSIONS else ""
        raise InvalidFile(f"version {swapped if order else version}{order}; 2 and 3 can be read")
    tensors = cursor.u64()
    pairs = cursor.count(LEAST_PAIR)
    metadata = FileMetadata(path, data, dict(_offsets(cursor, pairs)))
    if len(metadata) < pairs:
        raise InvalidFile("a key stands in it twice")
    if tensors * LEAST_TENSOR > cursor.left:
        raise InvalidFile(f"{tensors:,} tensors are said to follow in {cursor.left:,} bytes")
    listed = [_tensor(cursor) for _ in range(tensors)]
    alignment = metadata.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise InvalidFile(f"{ALIGNMENT} is {alignment}")
    begin = -(-cursor.at // alignment) * alignment
    return Header(path, metadata, _located(listed, begin, len(data)), data)


def _offsets(cursor: Cursor, pairs: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for _ in range(pairs):
        key = cursor.string()
        kind = cursor.u32()
        yield key, (kind, cursor.at)
        try:
            cursor.skip(kind)
        except InvalidFile as error:
            raise InvalidFile(f"{quote(key)}: {error}") from None


def _tensor(cursor: Cursor) -> TensorInfo:
    """The next of the list; its offset counts from where the weights begin."""
    name = cursor.string()
    if len(name.encode()) > LONGEST_NAME or not name.isprintable():
        raise InvalidFile(f"{quote(name)} is no name of a tensor")
    dimensions = cursor.u32()
    if not 1 <= dimensions <= DIMENSIONS:
        raise InvalidFile(f"{name} has {dimensions} dimensions")
    shape = tuple(cursor.u64() for _ in range(dimensions))[::-1]
    number = cursor.u32()
    offset = cursor.u64()
    kind = TYPES.get(number, f"of type {number}")
    # Of a type that cannot be decoded the size is not known; who asks for the tensor is told.
    values, size = BLOCKS.get(kind, (1, 0))
    if shape[-1] % values or not 0 < math.prod(shape) <= MOST_VALUES:
        raise InvalidFile(f"{name} is {kind} with the shape {list(shape)}")
    return TensorInfo(name, kind, shape, offset, math.prod(shape) // values * size)


def _located(listed: list[TensorInfo], begin: int, size: int) -> dict[str, TensorInfo]:
    """With offsets from the file's begin. All lie in the file, and none in another."""
    located: dict[str, TensorInfo] = {}
    for tensor in listed:
        offset = begin + tensor.offset
        if offset + tensor.nbytes > size:
            raise InvalidFile(
                f"truncated: {tensor.name} ends at byte {offset + tensor.nbytes:,} of {size:,}"
            )
        located[tensor.name] = TensorInfo(
            tensor.name, tensor.type, tensor.shape, offset, tensor.nbytes
        )
    if len(located) < len(listed):
        raise InvalidFile("a tensor stands in it twice")
    for left, right in pairwise(sorted(located.values(), key=lambda tensor: tensor.offset)):
        if left.offset + left.nbytes > right.offset:
            raise InvalidFile(f"{left.name} and {right.name} lie on each other")
    return located

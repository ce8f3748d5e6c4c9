"""A GGUF file's header: key-values, and a list of tensors that is checked against the file's size.

A value is decoded when it is accessed: a vocabulary has megabytes, and most readers need a few
numbers. Reads no weights. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pipeinfer.settings import ConfigurationError

STRING, ARRAY = 8, 9
# From a value's type to its NumPy dtype; 7 is a boolean of one byte.
NUMBERS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# The most entries of an array that is decoded. The largest vocabularies have 250,000 tokens; as a
# Python object an entry takes up to ten times its bytes.
MAX_ENTRIES = 4_000_000
DEEPEST = 3  # the deepest nesting of arrays

Value: TypeAlias = "str | int | float | bool | list[Value]"


class InvalidFile(ValueError):
    """The file contradicts itself or the format; the message is the reason."""


class Cursor:
    """Reads values of a file, one after another.

    Attributes:
    - at: the byte that is read next
    - remaining: bytes from there to the file's end

    All methods that read raise InvalidFile if the file ends too early or has a wrong value.
    """

    def __init__(self, data: mmap.mmap | bytes, at: int = 0) -> None:
        self._data = data
        self.at = at
        self._size = len(data)

    @property
    def remaining(self) -> int:
        """Bytes from `at` to the file's end."""
        return self._size - self.at

    def u32(self) -> int:
        return struct.unpack_from("<I", self._data, self._skipped(4))[0]

    def u64(self) -> int:
        return struct.unpack_from("<Q", self._data, self._skipped(8))[0]

    def count(self, least: int) -> int:
        """A number of elements, each of at least `least` bytes. Raises InvalidFile if so many do
        not fit into the rest of the file.
        """
        number = self.u64()
        if number * least > self.remaining:
            raise InvalidFile(f"{number:,} things are said to follow in {self.remaining:,} bytes")
        return number

    def string(self) -> str:
        size = self.count(1)
        return self._text(self._skipped(size), self.at)

    def value(self, kind: int) -> Value:
        """Reads the next value.

        - kind: its type: STRING, ARRAY or a key of NUMBERS
        """
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self._numbers(kind, 1)[0]
        of, number = self._array_head()
        if number > MAX_ENTRIES:
            raise InvalidFile(f"an array has {number:,} entries; at most {MAX_ENTRIES:,} are read")
        if of == ARRAY:
            raise InvalidFile("it is an array of arrays")
        if of == STRING:
            return [self._text(start, end) for start, end in self._strings(number)]
        return self._numbers(of, number)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Goes past the next value without decoding it.

        - kind: its type
        - depth: arrays around it
        """
        if kind == STRING:
            self._skipped(self.count(1))
        elif kind != ARRAY:
            self._skipped(_number(kind).itemsize)
        elif depth == DEEPEST:
            raise InvalidFile(f"arrays lie more than {DEEPEST} deep in each other")
        else:
            of, number = self._array_head()
            if of == STRING:
                for _ in self._strings(number):
                    pass
            elif of == ARRAY:
                for _ in range(number):
                    self.skip(of, depth + 1)
            else:
                self._skipped(number * _number(of).itemsize)

    def _text(self, start: int, end: int) -> str:
        try:
            return self._data[start:end].decode()
        except UnicodeDecodeError:
            raise InvalidFile(f"the string at byte {start} is not UTF-8") from None

    def _strings(self, number: int) -> Iterator[tuple[int, int]]:
        """The first byte and the end of each of `number` strings. Fast, because a vocabulary has
        250,000 of them.
        """
        data, size, length = self._data, self._size, struct.Struct("<Q").unpack_from
        end = self.at
        for _ in range(number):
            start = end + 8
            end = start + length(data, end)[0] if start <= size else start
            if end > size:
                raise InvalidFile(f"it ends at byte {size:,}, within a string")
            yield start, end
        self.at = end

    def _array_head(self) -> tuple[int, int]:
        of = self.u32()
        least = {STRING: 8, ARRAY: 12}.get(of)
        return of, self.count(_number(of).itemsize if least is None else least)

    def _numbers(self, kind: int, number: int) -> list[Value]:
        dtype = _number(kind)
        start = self._skipped(number * dtype.itemsize)
        # A copy, because a view would keep the map from being closed.
        return np.frombuffer(self._data[start : self.at], dtype).tolist()

    def _skipped(self, size: int) -> int:
        """Goes past the next `size` bytes, and returns where they begin."""
        if size > self.remaining:
            raise InvalidFile(
                f"it ends at byte {self._size:,}, {size - self.remaining:,} bytes too early"
            )
        self.at += size
        return self.at - size


def _number(kind: int) -> np.dtype:
    if kind not in NUMBERS:
        raise InvalidFile(f"{kind} is no type of a value")
    return NUMBERS[kind]


Metadata = Mapping[str, object]

SHOWN = 60  # characters of a wrong value that an error message quotes


def metadata_error(key: str, problem: str) -> ConfigurationError:
    """An error of one line about the value of a key."""
    name = key if key.isprintable() and len(key) <= SHOWN else quote(key)
    return ConfigurationError(f"the GGUF file's {name}: {problem}")


def quote(text: str) -> str:
    """A text of the file for an error message: at most SHOWN characters, on one line."""
    return ascii(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def read_text(metadata: Metadata, key: str) -> str | None:
    """The text of a key; None if the key is absent. Raises ConfigurationError for other values."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise metadata_error(key, f"not a text but {_kind(value)}")
    _check_unicode(key, value, "the text")
    return value


def read_flag(metadata: Metadata, key: str, default: bool) -> bool:
    """The boolean of a key; `default` if the key is absent. Raises ConfigurationError for other
    values.
    """
    value = metadata.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise metadata_error(key, f"not true or false but {_kind(value)}")
    return value


def read_index(metadata: Metadata, key: str, size: int) -> int | None:
    """The token id of a key, below `size`; None if the key is absent. Raises ConfigurationError for
    other values.
    """
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise metadata_error(key, f"not a whole number but {_kind(value)}")
    if not 0 <= value < size:
        raise metadata_error(key, f"no token has this id, there are {size}")
    return value


def read_texts(metadata: Metadata, key: str) -> list[str]:
    """The list of texts of a key. Raises ConfigurationError for other values, or if the key is
    absent.
    """
    value = _list(metadata, key)
    texts = [item for item in value if isinstance(item, str)]
    if len(texts) != len(value):
        raise metadata_error(key, "holds something that is not a text")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        for number, text in enumerate(texts):
            _check_unicode(key, text, f"entry {number}")
    return texts


def read_integers(metadata: Metadata, key: str, size: int) -> list[int]:
    """The list of `size` whole numbers of a key. Raises ConfigurationError for other values, or if
    the key is absent.
    """
    value = _list(metadata, key)
    numbers = [item for item in value if isinstance(item, int) and not isinstance(item, bool)]
    if len(numbers) != len(value):
        raise metadata_error(key, "holds something that is not a whole number")
    _check_size(key, numbers, size)
    return numbers


def read_numbers(metadata: Metadata, key: str, size: int) -> list[float]:
    """The list of `size` numbers of a key, without NaN. Raises ConfigurationError for other values,
    or if the key is absent.
    """
    value = _list(metadata, key)
    numbers: list[float] = [
        item for item in value if isinstance(item, float | int) and not isinstance(item, bool)
    ]
    if len(numbers) != len(value) or any(number != number for number in numbers):
        raise metadata_error(key, "holds something that is not a number")
    _check_size(key, numbers, size)
    return numbers


def _list(metadata: Metadata, key: str) -> list[object]:
    value = metadata.get(key)
    if value is None:
        raise metadata_error(key, "missing")
    if not isinstance(value, list):
        raise metadata_error(key, f"not a list but {_kind(value)}")
    return value


def _check_size(key: str, values: Sequence[object], size: int) -> None:
    if len(values) != size:
        raise metadata_error(key, f"has {len(values)} entries for {size} tokens")


def _check_unicode(key: str, text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise metadata_error(key, f"{name} is not Unicode: {quote(text)}") from None


def _kind(value: object) -> str:
    return type(value).__name__


SUFFIX = ".gguf"


def is_gguf(checkpoint: Path) -> bool:
    """Whether a checkpoint is a GGUF file, judged by the name alone: nothing is read."""
    return checkpoint.suffix.lower() == SUFFIX


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has nothing else to serve; None: none is there. Raises
    ConfigurationError for several."""
    if (folder / "config.json").exists():
        return None
    files = sorted(one for one in folder.iterdir() if one.is_file() and is_gguf(one))
    if len(files) > 1:
        names = ", ".join(one.name for one in files)
        raise ConfigurationError(
            f"model {str(folder)!r} has several GGUF files, {names}: give the path of one"
        )
    return absolute(files[0]) if files else None


def absolute(file: Path) -> Path:
    """Returns the absolute path with the file's own name: the target of a link may have another, as
    in the hub's cache.
    """
    return file.parent.resolve() / file.name


# Names of the tensors' types, by the format's numbers.
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
    23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
# (values, bytes) of a block, by the types that can be decoded. A row consists of whole blocks.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "IQ4_NL": (32, 18), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip

INT4_TYPES = ("Q4_0", "Q4_1", "Q4_K")  # whose values are whole numbers of 4 bits, scaled by group
INT4_GROUP = 32  # values of a row that share a scale and a zero

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
DIMENSIONS = 4  # the most dimensions of a tensor
MAX_VALUES = 1 << 48  # the most values of a tensor; their number of bytes fits into 64 bits
LONGEST_NAME = 64  # the most bytes of a tensor's name, as in llama.cpp
LEAST_PAIR = 8 + 4 + 1  # bytes of an empty key, a type and the smallest value
LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of an empty name, one dimension, a type and an offset


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a GGUF file.

    Attributes:
    - name: llama.cpp's, such as "blk.0.attn_q.weight"
    - type: such as "F32" or "Q4_K"
    - shape: slowest dimension first, as in torch; the file has it the other way round
    - offset: in bytes from the file's beginning
    - nbytes: its size; 0 if the type cannot be decoded
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class FileMetadata(Mapping[str, Value]):
    """The key-values of a file, by key. Each access decodes the value from the file, and raises
    ConfigurationError if it is broken.
    """

    def __init__(self, path: Path, data: mmap.mmap, offsets: dict[str, tuple[int, int]]) -> None:
        """Values of the header. offsets: (type, byte offset) of each value, by key."""
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
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
    - path: of the file
    - metadata: the key-values
    - tensors: by name
    - data: the mapped file
    """

    path: Path
    metadata: FileMetadata
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def error(self, message: str) -> ConfigurationError:
        """A ConfigurationError to be raised: `message` behind the file's path."""
        return ConfigurationError(f"{self.path}: {message}")


def read_header(path: Path) -> GgufHeader:
    """Reads the header of a file. Raises ConfigurationError, in one line, if it is not a GGUF file,
    truncated or broken.
    """
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # mmap does not take an empty file
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    try:
        return _read(path, data)
    except InvalidFile as error:
        raise ConfigurationError(f"{path} is a broken GGUF file: {error}") from None


def _read(path: Path, data: mmap.mmap) -> GgufHeader:
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
    if tensors * LEAST_TENSOR > cursor.remaining:
        raise InvalidFile(f"{tensors:,} tensors are said to follow in {cursor.remaining:,} bytes")
    listed = [_tensor(cursor) for _ in range(tensors)]
    alignment = metadata.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise InvalidFile(f"{ALIGNMENT} is {alignment}")
    begin = -(-cursor.at // alignment) * alignment
    return GgufHeader(path, metadata, _located(listed, begin, len(data)), data)


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
    """Reads the next entry of the list of tensors. Its offset counts from the beginning of the
    weights.
    """
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
    # The size of a type that cannot be decoded is unknown. Loading such a tensor raises an error.
    values, size = BLOCKS.get(kind, (1, 0))
    if shape[-1] % values or not 0 < math.prod(shape) <= MAX_VALUES:
        raise InvalidFile(f"{name} is {kind} with the shape {list(shape)}")
    return TensorInfo(name, kind, shape, offset, math.prod(shape) // values * size)


def _located(listed: list[TensorInfo], begin: int, size: int) -> dict[str, TensorInfo]:
    """The tensors by name, with offsets from the file's beginning. Raises InvalidFile if one is
    outside of the file or overlaps another.

    - begin: where the weights begin
    - size: of the file, in bytes
    """
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

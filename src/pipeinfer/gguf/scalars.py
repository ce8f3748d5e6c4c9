"""How GGUF writes its values: little-endian numbers, strings with a length before them, arrays.

Knows positions in a file; not what a key means. Format: https://github.com/ggml-org/ggml/blob/
master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap
from typing import TypeAlias

import numpy as np

STRING, ARRAY = 8, 9
# Type of a value -> how numpy reads it; 7 is a truth value in one byte.
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
# Of an array that somebody asks for. The largest vocabularies have a quarter of a million tokens;
# as Python objects an entry takes up to ten times its bytes.
MOST_ENTRIES = 4_000_000
DEEPEST = 3  # arrays in arrays

Value: TypeAlias = "str | int | float | bool | list[Value]"


class InvalidFile(ValueError):
    """The file is not what it says; the text says how."""


class Cursor:
    """Reads one value after another from `data`, from `at` on; raises Broken at the end of it."""

    def __init__(self, data: mmap | bytes, at: int = 0) -> None:
        self._data = data
        self.at = at
        self._size = len(data)

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self._size - self.at

    def u32(self) -> int:
        return struct.unpack_from("<I", self._data, self._skipped(4))[0]

    def u64(self) -> int:
        return struct.unpack_from("<Q", self._data, self._skipped(8))[0]

    def count(self, least: int) -> int:
        """A number of things of which each takes `least` bytes or more."""
        number = self.u64()
        if number * least > self.left:
            raise InvalidFile(f"{number:,} things are said to follow in {self.left:,} bytes")
        return number

    def string(self) -> str:
        size = self.count(1)
        return self._text(self._skipped(size), self.at)

    def value(self, kind: int) -> Value:
        """The value of type `kind` that stands here."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self._numbers(kind, 1)[0]
        of, number = self._array_head()
        if number > MOST_ENTRIES:
            raise InvalidFile(f"an array has {number:,} entries; at most {MOST_ENTRIES:,} are read")
        if of == ARRAY:
            raise InvalidFile("it is an array of arrays")
        if of == STRING:
            return [self._text(start, end) for start, end in self._strings(number)]
        return self._numbers(of, number)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Goes past it, and makes nothing of it."""
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
        """Where each of them begins and ends. A vocabulary has a quarter of a million."""
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
        # A copy: what looks into the map would hold it open.
        return np.frombuffer(self._data[start : self.at], dtype).tolist()

    def _skipped(self, size: int) -> int:
        """Where the next `size` bytes begin; the cursor is behind them."""
        if size > self.left:
            raise InvalidFile(
                f"it ends at byte {self._size:,}, {size - self.left:,} bytes too early"
            )
        self.at += size
        return self.at - size


def _number(kind: int) -> np.dtype:
    if kind not in NUMBERS:
        raise InvalidFile(f"{kind} is no type of a value")
    return NUMBERS[kind]

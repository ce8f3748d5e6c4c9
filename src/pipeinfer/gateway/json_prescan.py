"""A JSON pre-scan: how deep a body is nested and how many values it holds, before anything is
built.

The raw bytes are scanned slice by slice, so that an event loop may run between two slices. The scan
does not judge the JSON; the decoder says later what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Deep enough for any conversation and any schema of a tool; far from what recursive decoders,
# encoders and chat templates can take. They fail at about a thousand.
MAX_DEPTH = 64
# Token ids of several prompts of 100,000 each fit; decoding that many takes some 40 ms, in which
# nothing else runs.
MAX_VALUES = 1_000_000
# Lists and objects cost ten times as much as an id.
MAX_CONTAINERS = 100_000
# A member of an object is a key and a value, and five times as much as an id.
MAX_MEMBERS = 100_000
# Chats carry texts. What is free-form in them (arguments of templates, tool calls) is built value
# by value in this stage and again in the next.
MAX_CHAT_VALUES = 100_000

SLICE_BYTES = 128 * 1024  # bytes between two iterations of the loop; the worst take 5 ms

MAX_BRACKETS_ONE_BY_ONE = 32  # brackets that are looked at one by one: most bodies have a handful

_OPENING, _CLOSING = b"[{", b"]}"
_NOT_STRUCTURE = bytes(c for c in range(256) if c not in b"[]{},:")
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[list(_OPENING)], _STEPS[list(_CLOSING)] = 1, -1


class JsonLimits(NamedTuple):
    """The most that a body may hold.

    Attributes:
    - depth: levels of nesting
    - values: values of any kind
    - containers: lists and objects
    - members: of all objects
    """

    depth: int = MAX_DEPTH
    values: int = MAX_VALUES
    containers: int = MAX_CONTAINERS
    members: int = MAX_MEMBERS


CHAT_LIMITS = JsonLimits(values=MAX_CHAT_VALUES)
COMPLETION_LIMITS = JsonLimits()


class JsonLimitExceeded(ValueError):
    """A limit is exceeded; the message says which, for the client."""


class JsonPrescan:
    """The counts so far. In invalid JSON they are what brackets, commas and colons outside of
    strings amount to.

    Attributes:
    - depth: deepest level of nesting
    - containers: lists and objects that were opened
    - values: 1, and 1 more for each comma and each container; so an empty list counts twice
    - members: of all objects
    """

    def __init__(self, bounds: JsonLimits) -> None:
        self._bounds = bounds
        self.depth = self.containers = self.members = 0
        self.values = 1
        self._level = 0
        self._in_string = False
        self._escaping = False  # the last byte was a backslash that escapes the next one

    def feed(self, chunk: bytes) -> None:
        """Scans the next bytes, cut anywhere. JsonLimitExceeded at the first limit exceeded."""
        structure = self._structure(chunk)
        commas = structure.count(b",")
        brackets = structure.translate(None, b",:")
        self.values += commas
        self.members += structure.count(b":")
        if brackets:
            opened = brackets.count(b"[") + brackets.count(b"{")
            self._nest(brackets)
            self.containers += opened
            self.values += opened
        self._check()

    def _nest(self, brackets: bytes) -> None:
        if len(brackets) <= MAX_BRACKETS_ONE_BY_ONE:
            for bracket in brackets:
                self._level += 1 if bracket in _OPENING else -1
                self.depth = max(self.depth, self._level)
            return
        levels = np.cumsum(_STEPS[np.frombuffer(brackets, np.uint8)], dtype=np.int64)
        self.depth = max(self.depth, self._level + int(levels.max()))
        self._level += int(levels[-1])

    def _check(self) -> None:
        bounds = self._bounds
        if self.depth > bounds.depth:
            raise JsonLimitExceeded(f"the body is nested deeper than {bounds.depth} levels")
        if self.containers > bounds.containers:
            raise JsonLimitExceeded(
                f"the body holds more than {bounds.containers} lists and objects"
            )
        if self.values > bounds.values:
            raise JsonLimitExceeded(f"the body holds more than {bounds.values} values")
        if self.members > bounds.members:
            raise JsonLimitExceeded(f"the body holds more than {bounds.members} members of objects")

    def _structure(self, chunk: bytes) -> bytes:
        """The brackets, commas and colons of `chunk` that are outside of strings."""
        if self._escaping:
            chunk = b"\\" + chunk
            self._escaping = False
        if b"\\" in chunk:  # outside of strings it is an error, which the decoder finds
            chunk = chunk.replace(b"\\\\", b"")
            self._escaping = chunk.endswith(b"\\")
            chunk = chunk.replace(b'\\"', b"")
        if b'"' not in chunk:
            return b"" if self._in_string else chunk.translate(None, _NOT_STRUCTURE)
        parts = chunk.split(b'"')  # by turns outside and inside
        outside = parts[1::2] if self._in_string else parts[::2]
        self._in_string ^= len(parts) % 2 == 0
        return b"".join(outside).translate(None, _NOT_STRUCTURE)


def prescan(body: bytes | bytearray, bounds: JsonLimits) -> Iterator[None]:
    """Scans all of `body`, one slice each time it is asked to go on. Raises JsonLimitExceeded."""
    scan = JsonPrescan(bounds)
    for start in range(0, len(body), SLICE_BYTES):
        scan.feed(bytes(body[start : start + SLICE_BYTES]))
        if start + SLICE_BYTES < len(body):
            yield

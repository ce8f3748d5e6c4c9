"""What is fuzzed: a target takes bytes, and raises if what it promises does not hold.

Knows no engine. Targets are found by name and imported when they are chosen.
"""

from __future__ import annotations

import importlib
from random import Random
from typing import Protocol

TARGETS = {
    "frames": "frames and the reader: whatever a peer sends, it is read or dropped and counted",
    "cores": "messages that make no sense, to new cores, and to scheduler and engines that run",
    "traces": "trace files: read, or UnreadableTrace, or RestoreError, in bounded memory",
    "checkpoint": "headers of weights and number formats: loaded, or one clear error, soon",
    "http": "a gateway: no 500, errors in their form, and the next client is answered",
    "radix": "the radix tree and the memory manager against models of them",
}


class Wrong(AssertionError):
    """A promise that did not hold; the text says which."""


class Target(Protocol):
    """`instrumented`: modules whose branches guide a coverage-guided engine."""

    instrumented: tuple[str, ...]

    def seeds(self) -> list[bytes]:
        """Inputs to begin with, all of them good."""
        ...

    def one(self, data: bytes) -> None:
        """Runs one input. Anything that it raises is a finding."""
        ...

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Another input, made from `data` with knowledge of its structure."""
        ...

    def close(self) -> None:
        """Ends what it started."""
        ...


def make(name: str) -> Target:
    """The target called `name`."""
    return importlib.import_module(f"fuzz.{name}").make()

"""The radix tree and the memory manager, driven by bytes, against plain models of them.

An input is a program: each byte chooses what is done next, and with what. After each operation the
tree holds what a dictionary holds, all invariants are true, and every row's pages hold the tokens
of its own request.
"""

from __future__ import annotations

from random import Random

from fuzz import manager_model, tree_model

LONGEST = 600  # bytes of a program


def make() -> Radix:
    """The target."""
    return Radix()


class Program:
    """Numbers out of bytes; zeros, and `over`, when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data[:LONGEST], 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def below(self, most: int) -> int:
        """0 to most - 1; most is at most 256."""
        if self.over:
            return 0
        self._at += 1
        return self._data[self._at - 1] % most


class Radix:
    """See Target."""

    instrumented = (
        "pipeinfer.memory.prefix_cache", "pipeinfer.memory.manager", "pipeinfer.memory.pages",
    )  # fmt: skip

    def seeds(self) -> list[bytes]:
        """Programs for both models."""
        source = Random(4)
        return [bytes([kind]) + source.randbytes(size) for kind in (0, 1) for size in (20, 90, 300)]

    def mutated(self, data: bytes, source: Random) -> bytes:
        """One operation more, once more, or another."""
        return changed(data, source)

    def one(self, data: bytes) -> None:
        """Runs the program."""
        program = Program(data[1:])
        model = (tree_model.run, manager_model.run)[(data or b"\0")[0] % 2]
        model(program)

    def close(self) -> None:
        """Nothing was started."""


def changed(data: bytes, source: Random) -> bytes:
    """A program with one operation more, once more, or another; its first byte is its kind."""
    changed = bytearray(data or b"\0")
    at, size = source.randrange(len(changed)), source.choice((1, 3, 8, 24))
    kind = source.randrange(4)
    if kind == 0:
        changed += source.randbytes(size)
    elif kind == 1:
        changed[at:at] = changed[at : at + size]
    elif kind == 2:
        changed[at : at + size] = source.randbytes(size)
    else:
        del changed[at : at + size]
    return bytes(changed[: LONGEST + 1]) or b"\0"

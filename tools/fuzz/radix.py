"""The radix tree and the memory manager beside the models that their tests have.

An input chooses a state machine of tests/memory, and is what Hypothesis draws from. Behind its end
stand zeros, so that no operation is cut short.
"""

from __future__ import annotations

import importlib
import sys
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis.stateful import get_state_machine_test

from fuzz.inputs import changed_program
from harness.command_line import ROOT
from pipeinfer.memory import pages

MACHINES = {"test_prefix_cache": "RadixMachine", "test_memory_machine": "MemoryMachine"}
SIZES = (1, 4, 16)  # of pages, in tokens
STEPS = 40  # operations of an input
LONGEST = 1500  # bytes
DRAWN = 0.6  # share of inputs that are made of nothing before
ZEROS = bytes(1 << 15)


def make() -> Radix:
    """The target."""
    return Radix()


class Radix:
    """See Target."""

    instrumented = (
        "pipeinfer.memory.prefix_cache", "pipeinfer.memory.manager", "pipeinfer.memory.pages",
    )  # fmt: skip

    def __init__(self) -> None:
        sys.path[:0] = [str(ROOT / "tests/memory"), str(ROOT / "tests")]
        pages.MIN_SHARED_TOKENS = 1
        chosen = settings(database=None, deadline=None, stateful_step_count=STEPS)
        self._tests: list[Any] = []
        for module, name in MACHINES.items():
            machine = getattr(importlib.import_module(module), name)
            for size in SIZES:
                of_size = type(name, (machine,), {"page_size": size})
                test: Any = get_state_machine_test(of_size, settings=chosen)
                self._tests.append(test.hypothesis.fuzz_one_input)

    def seeds(self) -> list[bytes]:
        """One without a choice for each machine, and drawn ones."""
        source = Random(4)
        machines = range(len(self._tests))
        return [bytes([n]) + source.randbytes(size) for size in (0, 200, 1200) for n in machines]

    def mutated(self, data: bytes, source: Random) -> bytes:
        """Drawn anew; or some bytes more, once more, or others."""
        if source.random() < DRAWN:
            machine = source.randrange(len(self._tests))
            return bytes([machine]) + source.randbytes(source.randrange(LONGEST))
        return changed_program(data, source, (1, 3, 8, 24, 200), LONGEST)

    def one(self, data: bytes) -> None:
        """Runs the operations that the bytes choose."""
        kind, rest = (data or b"\0")[0], data[1:LONGEST]
        self._tests[kind % len(self._tests)](rest + ZEROS)

    def close(self) -> None:
        """Nothing was started."""

"""Fuzzing targets, the judge of what they raise, and the engines that make inputs.

- A target takes bytes, and raises if what it promises does not hold. It is imported by its name.
- The judge keeps one input of each kind of error.
- `mutate` needs nothing and makes the same inputs for the same seed; `atheris` is guided by
  coverage.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import mmap
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any, Protocol

from fuzz.inputs import LONGEST, mutated_bytes

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


OFTEN = 0.5  # seconds between two notes of how far it is
LARGEST = 4 << 20  # bytes of an input that can be told after a crash of the process
OWN = ("fuzz/engines.py",)


class Judge:
    """`executions`: inputs that ran. `findings`: by signature. first: ends the process with the
    first finding whose signature contains it."""

    def __init__(
        self, target: Target, name: str, out: Path, worker: int, first: str | None
    ) -> None:
        self._target, self._name, self._out, self._first = target, name, out, first
        self._state = out / f"worker-{worker}.json"
        self._began = self._noted = time.monotonic()
        self.executions = 0
        self.findings: dict[str, dict[str, Any]] = {}
        last = out / f"worker-{worker}.last"
        last.write_bytes(bytes(LARGEST))
        with last.open("r+b") as file:
            self._last = mmap.mmap(file.fileno(), LARGEST)

    def run(self, data: bytes) -> None:
        """One input."""
        self._remember(data)
        try:
            self._target.one(data)
        except Exception as error:
            self._found(data, error)
        self.executions += 1
        now = time.monotonic()
        if now - self._noted > OFTEN:
            self._noted = now
            self.note()

    def note(self) -> None:
        """Writes down how far it is."""
        said = {
            "executions": self.executions,
            "seconds": round(time.monotonic() - self._began, 2),
            "cpu_seconds": round(time.process_time(), 2),
            "findings": list(self.findings.values()),
        }
        beside = self._state.with_suffix(".new")
        beside.write_text(json.dumps(said))
        beside.replace(self._state)  # whoever reads it finds a whole one

    def _remember(self, data: bytes) -> None:
        """In memory that outlives the process."""
        kept = data[: LARGEST - 4]
        self._last[:4] = len(kept).to_bytes(4, "little")
        self._last[4 : 4 + len(kept)] = kept

    def _found(self, data: bytes, error: Exception) -> None:
        where = signature(error)
        if where in self.findings:
            return
        file = self._out / f"{self._name}-{hashlib.sha256(where.encode()).hexdigest()[:12]}.bin"
        file.write_bytes(data)
        self.findings[where] = {
            "signature": where,
            "message": str(error)[:500],
            "traceback": "".join(traceback.format_exception(error))[-4000:],
            "file": str(file),
            "bytes": len(data),
            "after_seconds": round(time.monotonic() - self._began, 2),
            "after_executions": self.executions + 1,
        }
        self.note()
        if self._first is not None and self._first in where:
            os._exit(0)  # an engine may hold the process in its own loop


def signature(error: BaseException) -> str:
    """The exception's kind, and where it was raised; of a broken promise what it says."""
    if isinstance(error, Wrong):
        return re.sub(r"[0-9]+|'.*'|\".*\"", "#", str(error))[:90]
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if not f.filename.endswith(OWN)), None)
    place = f"{'/'.join(Path(where.filename).parts[-2:])}:{where.lineno}" if where else "?"
    return f"{type(error).__name__} at {place}"


def last_input(out: Path, worker: int) -> bytes:
    """What a worker ran when its process ended; nothing if that was before its first input."""
    file = out / f"worker-{worker}.last"
    raw = file.read_bytes() if file.exists() else b""
    return raw[4 : 4 + int.from_bytes(raw[:4], "little")]


ENGINES = ("auto", "atheris", "mutate")
STRUCTURED = 0.7  # share of inputs that are made with knowledge of the structure
KEPT = 2000  # inputs that `mutate` goes on from
TOO_LONG = 30  # seconds for one input
MEGABYTES = 4096  # of memory, all in all


class TooSlow(Exception):
    """An input that took longer than TOO_LONG."""


def chosen(name: str) -> str:
    """`name`, or for "auto" the best that there is."""
    if name != "auto":
        return name
    return "atheris" if importlib.util.find_spec("atheris") else "mutate"


def run(
    engine: str,
    target: Target,
    judging: Judge,
    seconds: float,
    seed: int,
    corpus: Path,
) -> None:
    """Feeds inputs until the time is over; atheris then ends the process."""
    {"atheris": _atheris, "mutate": _mutate}[engine](target, judging, seconds, seed, corpus)


def _write_seeds(target: Target, corpus: Path) -> list[bytes]:
    """All that lies in the corpus, the target's own seeds among it."""
    corpus.mkdir(parents=True, exist_ok=True)
    for data in target.seeds():
        (corpus / hashlib.sha256(data).hexdigest()[:20]).write_bytes(data)
    return [path.read_bytes() for path in sorted(corpus.iterdir())]


def _mutate(
    target: Target,
    judging: Judge,
    seconds: float,
    seed: int,
    corpus: Path,
) -> None:
    source = Random(seed)
    inputs = _write_seeds(target, corpus)

    def too_slow(*_: object) -> None:
        raise TooSlow(f"more than {TOO_LONG} s")

    signal.signal(signal.SIGALRM, too_slow)
    deadline = time.monotonic() + seconds
    for data in inputs:
        judging.run(data)
    while time.monotonic() < deadline:
        data = _another(target, inputs, source)
        signal.alarm(TOO_LONG)
        judging.run(data)
        signal.alarm(0)
        if source.random() < 0.02:  # some go on from there
            if len(inputs) < KEPT:
                inputs.append(data)
            else:
                inputs[source.randrange(len(inputs))] = data
    judging.note()
    target.close()


def _another(target: Target, inputs: list[bytes], source: Random) -> bytes:
    data = source.choice(inputs)
    if source.random() < STRUCTURED:
        return target.mutated(data, source)
    if source.random() < 0.2:
        other = source.choice(inputs)
        data = data[: source.randrange(len(data) + 1)] + other[source.randrange(len(other) + 1) :]
    return mutated_bytes(data, source)


def _atheris(
    target: Target,
    judging: Judge,
    seconds: float,
    seed: int,
    corpus: Path,
) -> None:
    atheris: Any = importlib.import_module("atheris")
    _write_seeds(target, corpus)
    for name in target.instrumented:
        _instrument(atheris, sys.modules[name])

    def custom(data: bytes, most: int, number: int) -> bytes:
        source = Random(number)
        if source.random() < STRUCTURED:
            return target.mutated(data, source)[:most]
        return atheris.Mutate(data, most)

    words = [
        f"-max_total_time={max(1, round(seconds))}", f"-seed={seed + 1}", "-verbosity=0",
        f"-max_len={LONGEST}", f"-timeout={TOO_LONG}", f"-rss_limit_mb={MEGABYTES}",
        f"-artifact_prefix={corpus.parent}/ended-", "-reload=30",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *words, str(corpus)], judging.run, custom_mutator=custom)
    atheris.Fuzz()


def _instrument(atheris: Any, module: Any) -> None:
    """Every function of a module that is loaded already, in place: what tests put there stays."""
    for owner in [module, *(c for c in vars(module).values() if _is_class_of(c, module))]:
        for name, value in list(vars(owner).items()):
            plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if getattr(plain, "__module__", None) == module.__name__ and hasattr(plain, "__code__"):
                plain.__code__ = atheris.instrument_func(plain).__code__
                assert name


def _is_class_of(value: Any, module: Any) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__

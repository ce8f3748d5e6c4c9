"""Where inputs come from: a seeded mutator, or atheris, which is guided by coverage.

`mutate` needs nothing and makes the same inputs for the same seed; `atheris` is used where it is
installed, and finds more in the same time. Knows no target.
"""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutation
from fuzz.judge import Judge
from fuzz.target import Target

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
    make: Callable[[], Target],
    judge: Callable[[Target], Judge],
    seconds: float,
    seed: int,
    corpus: Path,
) -> None:
    """Feeds inputs until the time is over; atheris then ends the process."""
    {"atheris": _atheris, "mutate": _mutate}[engine](make, judge, seconds, seed, corpus)


def _write_seeds(target: Target, corpus: Path) -> list[bytes]:
    """All that lies in the corpus, the target's own seeds among it."""
    corpus.mkdir(parents=True, exist_ok=True)
    for data in target.seeds():
        (corpus / hashlib.sha256(data).hexdigest()[:20]).write_bytes(data)
    return [path.read_bytes() for path in sorted(corpus.iterdir())]


def _mutate(
    make: Callable[[], Target],
    judge: Callable[[Target], Judge],
    seconds: float,
    seed: int,
    corpus: Path,
) -> None:
    target = make()
    judging, source = judge(target), Random(seed)
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
    return mutation.mutated(data, source)


def _atheris(
    make: Callable[[], Target],
    judge: Callable[[Target], Judge],
    seconds: float,
    seed: int,
    corpus: Path,
) -> None:
    atheris: Any = importlib.import_module("atheris")
    target = make()
    judging = judge(target)
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
        f"-max_len={mutation.LONGEST}", f"-timeout={TOO_LONG}", f"-rss_limit_mb={MEGABYTES}",
        f"-artifact_prefix={corpus.parent}/ended-", "-reload=30",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *words, str(corpus)], judging.run, custom_mutator=custom)
    atheris.Fuzz()


def _instrument(atheris: Any, module: Any) -> None:
    """Every function of a module that is loaded already, in place: planted faults stay in it."""
    for owner in [module, *(c for c in vars(module).values() if _is_class_of(c, module))]:
        for name, value in list(vars(owner).items()):
            plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if getattr(plain, "__module__", None) == module.__name__ and hasattr(plain, "__code__"):
                plain.__code__ = atheris.instrument_func(plain).__code__
                assert name


def _is_class_of(value: Any, module: Any) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__

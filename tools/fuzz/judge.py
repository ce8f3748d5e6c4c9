"""Runs inputs, one after the other, and writes down which of them broke something, and how.

A finding is known by the kind of its exception and the line that raised it; only the first input of
each is kept. Knows no engine: whoever calls `run` chooses the inputs.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import time
import traceback
from pathlib import Path
from typing import Any

from fuzz.target import Target, Wrong

OFTEN = 0.5  # seconds between two notes of how far it is
LARGEST = 4 << 20  # bytes of an input that can be told after a crash of the process
OWN = ("fuzz/judge.py",)


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

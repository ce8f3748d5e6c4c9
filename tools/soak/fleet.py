"""Client processes that share the requests of a soak, and what they told.

Knows the lines of clients.py, which a thread for each process reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOOL = str(Path(__file__).parent)


class Fleet:
    """Processes of `clients` with these words each, as a context manager. After `wait`: `counts`
    and `wrong` of all, and `answers` by question.
    """

    def __init__(self, words: Sequence[Sequence[str]]) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, TOOL, "clients", *its], stdout=subprocess.PIPE, text=True
            )
            for its in words
        ]
        self._done = [0] * len(words)
        self._told: list[dict[str, Any]] = []
        self._readers = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(len(words))
        ]
        for reader in self._readers:
            reader.start()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.answers: dict[int, list[str]] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()

    @property
    def done(self) -> int:
        """Requests of all, as of a second ago."""
        return sum(self._done)

    def running(self) -> bool:
        """Whether any of them goes on."""
        return any(reader.is_alive() for reader in self._readers)

    def wait(self) -> None:
        """Until they end; RuntimeError for one that did not tell what it did."""
        for reader in self._readers:
            reader.join()
        if len(self._told) < len(self._processes):
            raise RuntimeError("a process of clients ended early")
        for told in self._told:
            self.counts.update(told["counts"])
            self.wrong += told["wrong"]
            self.answers |= {int(number): answer for number, answer in told["answers"].items()}

    def _read(self, number: int) -> None:
        output = self._processes[number].stdout
        assert output is not None
        for line in output:
            told = json.loads(line)
            if isinstance(told, int):
                self._done[number] = told
            else:
                self._told.append(told)

"""Runs an area's tests on a mutant: a copy of src/ with the change, in a process group of its own.

The tests and all else are the checkout's. Which of them run is not this module's business.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.areas import LEFT_OUT, ROOT

MEMORY = 16 * 2**30  # bytes of address space of one process: a change may let something grow
PASSED, NONE_RAN = 0, 5  # exit codes of pytest
# Hypothesis draws the same examples in every run, and remembers none. Else the same mutant would be
# killed in one run and live in the next.
PROFILE = "ci"
NOTICED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """`ended`: "killed", "survived" or "timeout". `by`: the test that noticed. `seconds`: it took.

    `said`: the end of what pytest printed.
    """

    ended: str
    by: str
    seconds: float
    said: str


class Workplace:
    """A copy of src/, below `folder`, in which one module at a time is another one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        self._texts = 0  # that were written

    def test(self, path: Path, text: str, tests: Sequence[str], limit: float) -> Outcome:
        """Runs `tests` with `text` in the place of the module `path`, for up to `limit` seconds."""
        file = self._folder / path
        before = file.read_text(encoding="utf-8")
        self._write(file, text)
        try:
            return self._run(tests, limit)
        finally:
            self._write(file, before)

    def _write(self, file: Path, text: str) -> None:
        """With a time that no other text had: Python knows by time and size which bytecode to use,
        and two texts of one size may be written within the same second."""
        self._texts += 1
        file.write_text(text, encoding="utf-8")
        os.utime(file, (self._texts, self._texts))

    def _run(self, tests: Sequence[str], limit: float) -> Outcome:
        paths = [self._folder / "src", ROOT / "tools"]
        paths += [Path(one) for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
        }
        left_out = [f"--deselect={test}" for test in LEFT_OUT]
        plain = ["-x", "-q", "--tb=no", "-rfE", f"--hypothesis-profile={PROFILE}"]
        options = [*plain, f"--basetemp={self._folder / 't'}", *left_out]
        begun = time.monotonic()
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
            said.seek(0)
            words = said.read().decode(errors="replace")
        return _outcome(code, time.monotonic() - begun, words)


def _outcome(code: int | None, seconds: float, words: str) -> Outcome:
    if code == NONE_RAN:
        raise RuntimeError(f"no test was run: {words[-2000:]}")
    first = NOTICED.search(words)
    by = "" if first is None else first[1]
    ended = "timeout" if code is None else "survived" if code == PASSED else "killed"
    return Outcome(ended, by, seconds, words[-2000:])

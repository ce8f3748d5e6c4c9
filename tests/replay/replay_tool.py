"""`python tools/replay` as a user runs it, and single stages beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import servers

ROOT = Path(__file__).resolve().parents[2]


def tool(*words: object, plant: Path | None = None, stdin: str = "", timeout: float = 900):
    """Runs `python tools/replay WORDS`; `plant`: a folder whose sitecustomize.py has a bug."""
    environment = servers.environment()
    if plant is not None:
        before = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{plant}{os.pathsep}{before}" if before else str(plant)
    return subprocess.run(
        [sys.executable, "tools/replay", *map(str, words)],
        cwd=ROOT, env=environment, capture_output=True, text=True, input=stdin, timeout=timeout,
    )  # fmt: skip


@contextmanager
def processes(*commands: list[object]):
    """Runs commands until the block ends; gives their Popen objects."""
    with ExitStack() as stack:
        running = []
        for words in commands:
            process = subprocess.Popen(
                [sys.executable, *map(str, words)], cwd=ROOT, env=servers.environment(),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            running.append(process)
            stack.callback(_end, process)
        yield running


def _end(process: subprocess.Popen) -> None:
    """At once: nothing waits for what these might still have to say."""
    process.kill()
    process.wait()
    process.stdout.close()

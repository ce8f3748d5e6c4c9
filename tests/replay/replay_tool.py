"""`python tools/replay` as a user runs it, and single stages beside it."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import servers
from pipeinfer.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def tool(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs `python tools/replay WORDS`, or rather in this process what it calls."""
    out, err, given = io.StringIO(), io.StringIO(), list(map(str, words))
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["replay", *given])
    return subprocess.CompletedProcess(given, code, out.getvalue(), err.getvalue())


def tool_process(*words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `python tools/replay WORDS`."""
    return subprocess.run(
        [sys.executable, "tools/replay", *map(str, words)], cwd=ROOT, env=servers.environment(),
        capture_output=True, text=True, input=stdin, timeout=900,
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

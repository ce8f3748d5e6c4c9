"""SIGHUP: files are read again, unless it says that the terminal was closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

SCRIPT = """
import asyncio
from pipeinfer.runtime.entry import add_reload_handler

async def main():
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    end = lambda: (print("ends", flush=True), over.set())
    add_reload_handler(loop, lambda: print("reads again", flush=True), end)
    print("begins", flush=True)
    await over.wait()

asyncio.run(main())
"""


def begun(**how) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, **how
    )
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    return process


def said(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_without_a_terminal_every_sighup_reads_again():
    process = begun(start_new_session=True)
    for _ in range(2):
        process.send_signal(signal.SIGHUP)
        assert said(process) == "reads again"
    process.kill()
    process.wait()


def test_a_terminal_that_is_closed_ends_it_and_one_that_is_there_does_not():
    keyboard, terminal = pty.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
        os.setsid()
        os.close(os.open(os.ttyname(terminal), os.O_RDWR))  # the first one opened is ours

    process = begun(preexec_fn=take_terminal, stdin=terminal)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    assert said(process) == "reads again"
    os.close(keyboard)
    assert said(process) == "ends"
    assert process.wait(30) == 0

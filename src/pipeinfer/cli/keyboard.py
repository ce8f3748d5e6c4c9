"""Single keys of a terminal, for a command that goes on until somebody presses one.

Knows no command.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from types import FrameType

QUIT = b"qQ"


class Keys:
    """Use it as a context manager: in it, a terminal gives keys without Enter and shows none.

    Without a terminal, in the background or if not `wanted`, nothing is read and nothing changes.
    `hint`: which key ends the command, "" if none does.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._source = -1
        self._quits = False
        if wanted and sys.stdin.isatty():
            source = sys.stdin.fileno()
            if not _in_background(source):
                self._source = source
        self.hint = "q ends" if self._source >= 0 else ""

    def __enter__(self) -> Keys:
        if self._source >= 0:
            self._before = termios.tcgetattr(self._source)
            self._handler = signal.signal(signal.SIGTERM, _end)  # or the terminal stays as it is
            tty.setcbreak(self._source)
        return self

    def __exit__(self, *_: object) -> None:
        if self._source >= 0:
            termios.tcsetattr(self._source, termios.TCSADRAIN, self._before)
            signal.signal(signal.SIGTERM, self._handler)

    def quits(self) -> bool:
        """Whether q was pressed; other keys do nothing."""
        while self._source >= 0 and not self._quits:
            if not select.select([self._source], [], [], 0)[0]:
                break
            keys = os.read(self._source, 1024)
            # A terminal that has gone is always readable, and gives nothing.
            self._quits = not keys or any(key in QUIT for key in keys)
        return self._quits


def _in_background(terminal: int) -> bool:
    """Whether the process would be stopped if it changed `terminal`."""
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # it is not the terminal that controls this process
        return False


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)

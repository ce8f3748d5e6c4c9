"""What SIGHUP means: read again what can be read again, or that the terminal was closed.

A process that was started in a terminal, and not under nohup, ends with its terminal, as every
program does; anything else that sends SIGHUP wants its files to be read anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable


def add_reload_handler(
    loop: asyncio.AbstractEventLoop, reload: Callable[[], None], end: Callable[[], None]
) -> None:
    """From now on SIGHUP calls `reload` on `loop`, or `end` if our terminal was closed."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or not _has_terminal()
    loop.add_signal_handler(
        signal.SIGHUP, lambda: reload() if outlives or _has_terminal() else end()
    )


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal; not any more after that was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True

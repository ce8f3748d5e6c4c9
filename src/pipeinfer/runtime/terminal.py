"""What standard input, output and error are at the start of a process, and what a terminal can do.

Knows no command and no stage.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from pipeinfer.settings import ConfigurationError


def open_streams() -> None:
    """Opens those that are closed, as by `<&-` or a daemon: else a socket gets the number, and
    libraries end the process when they close it. What output has no letter for is shown as "?".
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)  # stages have them, too
    os.close(number)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, closefd=False)  # noqa: SIM115 (as long as the process)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def undecodable_input(error: UnicodeDecodeError) -> ConfigurationError:
    """What is said of standard input whose bytes are no letters."""
    where = f"byte {error.start} of what was read: {error.reason}"
    return ConfigurationError(f"standard input is no text in {error.encoding}: {where}")


def can_rewrite(output: TextIO) -> bool:
    """Whether lines that `output` shows can be written over: it is a terminal, and no dumb one."""
    return output.isatty() and os.environ.get("TERM") != "dumb"

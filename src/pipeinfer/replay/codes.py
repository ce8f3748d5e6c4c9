"""How `pipeinfer replay` ends: its exit codes, and the errors that carry one.

Knows no command.
"""

from __future__ import annotations

EQUAL = 0
DIFFERENT = 1
USAGE = 2
UNREADABLE = 3  # no trace, or its header cannot be read
OTHER_PROTOCOL = 4
CRASHED = 5  # the stage raised


class CannotReplay(Exception):
    """One line for the user, and the exit code that goes with it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

"""What a stage tells the process that started it, through a pipe: its state, whenever that changes.

What decides whether a stage that ended had been ready must not get lost, or come after its end, as
a heartbeat may; what lies in a pipe outlives its writer. Knows no process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from contextlib import suppress

import msgspec

from pipeinfer.messages import State

# In the environment and not among the arguments: a stage of an older version does not mind it.
REPORT_FD_VARIABLE = "PIPEINFER_REPORT_FD"
READ_BYTES = 1 << 16
MAX_REASON_CHARS = 2_000  # of a reason: a pipe takes a page at once or not at all


log = logging.getLogger(__name__)


class StatusReport(msgspec.Struct, frozen=True, array_like=True):
    """As in a heartbeat; `pid`: of the stage itself, where something is wrapped around it.
    `newest`: the number of another process, by which this one was fenced out."""

    state: State
    reason: str
    pid: int
    incarnation: int
    newest: int = 0


def inherited_status_writer(
    environ: MutableMapping[str, str], incarnation: int
) -> StatusWriter | None:
    """For whoever started this process, if it wants to be told; further processes are not ours."""
    sink, _, inode = environ.pop(REPORT_FD_VARIABLE, "").partition(":")
    try:
        if sink and os.fstat(int(sink)).st_ino == int(inode):
            return StatusWriter(int(sink), incarnation)
    except (OSError, ValueError, OverflowError) as error:
        log.debug("%s=%s: %s", REPORT_FD_VARIABLE, sink, error)
    return None  # a command around us has closed it, and may have put its own there: heartbeats do


class StatusWriter:
    """The stage's end, the descriptor `sink`; it never waits."""

    def __init__(self, sink: int, incarnation: int) -> None:
        self.sink, self._incarnation = sink, incarnation
        os.set_blocking(sink, False)
        os.set_inheritable(sink, False)

    def write(self, state: State, reason: str, newest: int = 0) -> None:
        """Nobody may read it any more, or so seldom that the pipe is full: then it is not said."""
        reason = reason[:MAX_REASON_CHARS].encode("utf-8", "replace").decode()
        report = StatusReport(state, reason, os.getpid(), self._incarnation, newest)
        with suppress(OSError):
            os.write(self.sink, msgspec.json.encode(report) + b"\n")


class StatusReader:
    """The other end. `sink`: for the stage to inherit; close it here when it has. `ended`: nobody
    has it open any more."""

    def __init__(self) -> None:
        self.source, self.sink = os.pipe()
        os.set_blocking(self.source, False)
        self.ended = False
        self._rest = b""

    @property
    def name(self) -> str:
        """Of the sink, for DESCRIPTOR: its number, and what it is."""
        return f"{self.sink}:{os.fstat(self.sink).st_ino}"

    def close_sink(self) -> None:
        os.close(self.sink)

    def read(self) -> list[StatusReport]:
        """What was said since the last time, also by a process that has ended."""
        while not self.ended:
            try:
                chunk = os.read(self.source, READ_BYTES)
            except BlockingIOError:
                break
            self.ended = not chunk
            self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [report for line in lines if (report := _decoded(line)) is not None]

    def close(self) -> None:
        os.close(self.source)


def _decoded(line: bytes) -> StatusReport | None:
    """A command around the stage may write into it what it likes."""
    try:
        return msgspec.json.decode(line, type=StatusReport)
    except (ValueError, RecursionError):
        return None

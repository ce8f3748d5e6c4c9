"""Standard input, output and error of a process: opened if they are closed, what a terminal can do,
readers that have gone (as behind `| head`), and the line that says what a start waits for.

Knows no command; of stages only the states that they report.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import select
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TextIO

from pipeinfer.messages import State
from pipeinfer.settings import ConfigurationError

CLEAR_LINE = "\r\x1b[K"  # what a terminal's line shows so far is to be written over


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


def discard_unread() -> bool:
    """Sends what is printed from now on, and what still lies in buffers, nowhere, where nobody
    reads it any more; whether there was such an output."""
    closed = [number for number in (1, 2) if _has_no_reader(number)]
    if closed:
        devnull = os.open(os.devnull, os.O_WRONLY)
        for number in closed:
            os.dup2(devnull, number)
        os.close(devnull)
    return bool(closed)


def _has_no_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


log = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # seconds between two looks at what is waited for
CHANGED, SAME = 5.0, 10.0  # seconds between two lines of a log, with another text or the same
STARTING_STATES: tuple[State, ...] = ("starting", "loading")
MAX_NAMED = 3  # reasons that a line has room for


class StatusLine:
    """On a terminal, `show` rewrites one line, at once. Elsewhere, and where the log is JSON, it
    logs at most every 5 seconds: a start that is quick says nothing.

    output: where the line is written if it is a terminal, `rewritten` allowing. clock: seconds.
    doing: what the line begins with.
    """

    def __init__(
        self,
        rewritten: bool = True,
        output: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        doing: str = "starting",
    ) -> None:
        self._doing = doing
        self._output = output or sys.stderr
        self._rewrites = rewritten and can_rewrite(self._output)
        self._clock = clock
        self._began = self._shown_at = clock()
        self._shown = ""

    def show(self, text: str) -> None:
        """`text` is what is waited for at the moment."""
        now = self._clock()
        seconds = int(now - self._began)
        if self._rewrites:
            line = f"{self._doing} ({seconds} s): {text}"[: shutil.get_terminal_size().columns - 1]
            if line != self._shown:
                print(f"{CLEAR_LINE}{line}", end="", file=self._output, flush=True)
                self._shown = line
        elif now - self._shown_at >= (SAME if text == self._shown else CHANGED):
            log.info("%s, after %d s: %s", self._doing, seconds, text)
            self._shown, self._shown_at = text, now

    def clear(self) -> None:
        """The wait is over."""
        if self._rewrites and self._shown:
            print(CLEAR_LINE, end="", file=self._output, flush=True)
            self._shown = ""


async def show_until_ready(
    states: Callable[[], Mapping[str, tuple[State, str]]], line: StatusLine
) -> None:
    """Says what stages wait for until all are ready for the first time, at the level "info"."""
    while log.isEnabledFor(logging.INFO) and (waiting := waiting_summary(states())):
        line.show(waiting)
        await asyncio.sleep(POLL_SECONDS)
    line.clear()


def waiting_summary(states: Mapping[str, tuple[State, str]]) -> str:
    """What stages (id: state and reason) wait for; "" when all are ready.

    Stages that wait for others, or do not say what they do, are named only if there are no others.
    """
    left = {stage: status for stage, status in states.items() if status[0] != "ready"}
    busy = {stage: status for stage, status in left.items() if status[0] in STARTING_STATES} or left
    telling = {stage: status for stage, status in busy.items() if status[1]} or busy
    by_reason: dict[str, list[str]] = defaultdict(list)
    for stage, (state, reason) in telling.items():
        does = reason or state
        by_reason[does if state in STARTING_STATES else f"{state} ({does})"].append(stage)
    parts = [f"{_names(stages, states)}: {reason}" for reason, stages in by_reason.items()]
    more = [f"and {len(parts) - MAX_NAMED} more"] if len(parts) > MAX_NAMED else []
    return "; ".join([*parts[:MAX_NAMED], *more])


def _names(stages: list[str], all_stages: Mapping[str, object]) -> str:
    """By their kind, where there is one of a kind; many are counted."""
    if len(stages) > MAX_NAMED:
        return f"{len(stages)} stages"
    kinds = [stage.split("-")[0] for stage in all_stages]
    names = (stage.split("-")[0] for stage in stages)
    return ", ".join(
        name if kinds.count(name) == 1 else stage for name, stage in zip(names, stages, strict=True)
    )

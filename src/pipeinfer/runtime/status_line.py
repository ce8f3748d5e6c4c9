"""What a process waits for, said on stderr while it waits: one line that is rewritten, or a log.

Knows no stage; `waits` puts what stages say of themselves into a sentence.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TextIO

from pipeinfer.messages import State
from pipeinfer.runtime.logs import CLEAR_LINE
from pipeinfer.runtime.terminal import can_rewrite

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
    left = {stage: said for stage, said in states.items() if said[0] != "ready"}
    busy = {stage: said for stage, said in left.items() if said[0] in STARTING_STATES} or left
    telling = {stage: said for stage, said in busy.items() if said[1]} or busy
    by_reason: dict[str, list[str]] = defaultdict(list)
    for stage, (state, reason) in telling.items():
        does = reason or state
        by_reason[does if state in STARTING_STATES else f"{state} ({does})"].append(stage)
    told = [f"{_names(stages, states)}: {reason}" for reason, stages in by_reason.items()]
    more = [f"and {len(told) - MAX_NAMED} more"] if len(told) > MAX_NAMED else []
    return "; ".join([*told[:MAX_NAMED], *more])


def _names(stages: list[str], all_stages: Mapping[str, object]) -> str:
    """By their kind, where there is one of a kind; many are counted."""
    if len(stages) > MAX_NAMED:
        return f"{len(stages)} stages"
    kinds = [stage.split("-")[0] for stage in all_stages]
    names = (stage.split("-")[0] for stage in stages)
    return ", ".join(
        name if kinds.count(name) == 1 else stage for name, stage in zip(names, stages, strict=True)
    )

"""Input and output of a process: log lines as text or JSON, standard streams, and the status line
of a start.

- set_up_logging: log lines on stderr; with --log-format json one object a line
- open_streams: standard input, output and error, opened if they are closed
- discard_unread: drops output whose reader has gone, as behind `| head`
- StatusLine: the stages that a start waits for, rewritten on a terminal, else logged now and then

Knows no command; of stages only the states that they report.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

from pipeinfer.messages import State
from pipeinfer.observe.spans import read_traceparent
from pipeinfer.settings import ConfigurationError, Settings

log = logging.getLogger(__name__)

ACCESS = "pipeinfer.access"  # the logger that has a line for each request of a client
DETAILS = "pipeinfer.details"  # the logger of details of a start, for tuning and repair
_OWN = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object in one line; `stage`: id of the process's stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._stage = stage

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "stage": self._stage,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        line |= {
            name: value for name, value in vars(record).items() if name not in _OWN | set(line)
        }
        return json.dumps(line, default=str)


def set_up_logging(settings: Settings, name: str) -> None:
    """Sends log lines to stderr, each with the stage's id. The loggers ACCESS and DETAILS log only
    in JSON, or at the level "debug"."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonLines(name))
        logging.captureWarnings(True)
    else:
        # overwrites the status line of a start
        over = CLEAR_LINE if can_rewrite(sys.stderr) else ""
        form = f"{over}%(asctime)s %(levelname).1s {name} %(message)s"
        handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    quiet = settings.log_format == "text" and settings.log_level != "debug"
    for name in (ACCESS, DETAILS):
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.NOTSET)


def request_fields(message: object) -> dict[str, str]:
    """The `extra` of a log line about a message: its request id and trace id, if it has them."""
    request_id = str(getattr(message, "request_id", ""))
    parent = read_traceparent(str(getattr(message, "trace", "")))
    found = {"request_id": request_id} if request_id else {}
    return found if parent is None else {**found, "trace_id": parent.trace_id}


def report_error(settings: Settings, reason: str) -> None:
    """Writes the reason why the process ends to stderr."""
    if settings.log_format == "json":
        logging.getLogger(__name__).error("%s", reason)
    else:
        over = CLEAR_LINE if can_rewrite(sys.stderr) else ""
        print(f"{over}error: {reason}", file=sys.stderr, flush=True)


CLEAR_LINE = "\r\x1b[K"  # overwrites the current line of a terminal


def open_streams() -> None:
    """Opens standard streams that are closed, as by `<&-` or a daemon: otherwise a socket gets the
    number, and libraries end the process when they close it. Characters that the output cannot
    encode are shown as "?"; input that cannot be decoded is an error, in every locale."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)  # stages have them, too
    os.close(number)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, closefd=False)  # noqa: SIM115 (as long as the process)
            setattr(sys, name, stream)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def undecodable_input(error: UnicodeDecodeError, lines: int = 0) -> ConfigurationError:
    """The error for standard input that cannot be decoded; `lines`: lines that were read before."""
    line = lines + error.object.count(b"\n", 0, error.start) + 1
    where = f"is not {error.encoding.upper()} ({error.reason})"
    return ConfigurationError(f"line {line} of standard input {where}")


def can_rewrite(output: TextIO) -> bool:
    """Whether lines on `output` can be overwritten: it is a terminal, and no dumb one."""
    return output.isatty() and os.environ.get("TERM") != "dumb"


def discard_unread() -> bool:
    """Points outputs whose reader has gone at /dev/null, for later prints and for data still in
    buffers; whether there was such an output."""
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


POLL_SECONDS = 0.2  # seconds between two looks at the states
CHANGED, SAME = 5.0, 10.0  # seconds between two lines of a log, with another text or the same
STARTING_STATES: tuple[State, ...] = ("starting", "loading")
MAX_NAMED = 3  # reasons that a line has room for


class StatusLine:
    """The status line of a start. On a terminal, `show` rewrites one line, at once. Elsewhere, and
    with a JSON log, it logs at most every 5 seconds: a quick start logs nothing.

    - rewritten: whether a terminal's line may be rewritten
    - output: where the line is written
    - clock: seconds
    - doing: beginning of the line
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
        """Shows `text`, the stages that the start waits for at the moment."""
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
        """Removes the line when the wait is over."""
        if self._rewrites and self._shown:
            print(CLEAR_LINE, end="", file=self._output, flush=True)
            self._shown = ""


async def show_until_ready(
    states: Callable[[], Mapping[str, tuple[State, str]]], line: StatusLine
) -> None:
    """Shows which stages are waited for until all are ready for the first time, at the level
    "info"."""
    import asyncio  # only here: the command line's start pays for every import

    while log.isEnabledFor(logging.INFO) and (waiting := waiting_summary(states())):
        line.show(waiting)
        await asyncio.sleep(POLL_SECONDS)
    line.clear()


def waiting_summary(states: Mapping[str, tuple[State, str]]) -> str:
    """The stages that are waited for (id: state and reason), as a text; "" when all are ready.

    Stages that wait for others, or give no reason, are named only if there are no others.
    """
    not_ready = {stage: status for stage, status in states.items() if status[0] != "ready"}
    busy = {
        stage: status for stage, status in not_ready.items() if status[0] in STARTING_STATES
    } or not_ready
    with_reason = {stage: status for stage, status in busy.items() if status[1]} or busy
    by_reason: dict[str, list[str]] = defaultdict(list)
    for stage, (state, reason) in with_reason.items():
        does = reason or state
        by_reason[does if state in STARTING_STATES else f"{state} ({does})"].append(stage)
    parts = [f"{_names(stages, states)}: {reason}" for reason, stages in by_reason.items()]
    more = [f"and {len(parts) - MAX_NAMED} more"] if len(parts) > MAX_NAMED else []
    return "; ".join([*parts[:MAX_NAMED], *more])


def _names(stages: list[str], all_stages: Mapping[str, object]) -> str:
    """The names of `stages`: the kind if there is one of a kind, else the id; many are counted."""
    if len(stages) > MAX_NAMED:
        return f"{len(stages)} stages"
    kinds = [stage.split("-")[0] for stage in all_stages]
    names = (stage.split("-")[0] for stage in stages)
    return ", ".join(
        name if kinds.count(name) == 1 else stage for name, stage in zip(names, stages, strict=True)
    )

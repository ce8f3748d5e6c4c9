"""Log lines on stderr: for people, or one JSON object each.

What a line is about stands in its record's `extra`, which JSON lines have as further keys. Knows no
stage's business.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from pipeinfer import traceparent
from pipeinfer.runtime.terminal import CLEAR_LINE, can_rewrite
from pipeinfer.settings import Settings

ACCESS = "pipeinfer.access"  # the logger that has a line for each request of a client
DETAILS = "pipeinfer.details"  # the logger of how a start was done, for who tunes or repairs it
_OWN = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))


class JsonLines(logging.Formatter):
    """Each record as an object in one line. `stage`: whose process it is."""

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
    """Log lines on stderr, each with the stage's id. Requests and details have theirs in JSON, or
    at the level "debug"."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.log_format == "json":
        handler.setFormatter(JsonLines(name))
        logging.captureWarnings(True)
    else:
        over = CLEAR_LINE if can_rewrite(sys.stderr) else ""  # a line that says how far a start is
        form = f"{over}%(asctime)s %(levelname).1s {name} %(message)s"
        handler.setFormatter(logging.Formatter(form, "%H:%M:%S"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    quiet = settings.log_format == "text" and settings.log_level != "debug"
    for name in (ACCESS, DETAILS):
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.NOTSET)


def request_fields(message: object) -> dict[str, str]:
    """`extra` of a line about a message: of which request it is, and of which trace."""
    request_id = str(getattr(message, "request_id", ""))
    parent = traceparent.read(str(getattr(message, "trace", "")))
    found = {"request_id": request_id} if request_id else {}
    return found if parent is None else {**found, "trace_id": parent.trace_id}


def report_error(settings: Settings, reason: str) -> None:
    """Says on stderr why the process ends."""
    if settings.log_format == "json":
        logging.getLogger(__name__).error("%s", reason)
    else:
        over = CLEAR_LINE if can_rewrite(sys.stderr) else ""
        print(f"{over}error: {reason}", file=sys.stderr, flush=True)

"""Counts and logs the messages of a stage that could not be sent, and says whose request each was.

Knows no socket: why a message cannot leave is the bus's to say (bus/frames.py, bus/bus.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pipeinfer.bus.bus import NoSuchStage
from pipeinfer.core import Send
from pipeinfer.events import Unsent
from pipeinfer.runtime.logs import request_fields

log = logging.getLogger(__name__)

REASON_CHARS = 300  # of a reason; some of it is a client's
MAX_LOG_LINES = 100  # of the log, each about another kind of message or another receiver


class UnsentMessages:
    """`total`: messages that could not be sent, since the start."""

    def __init__(self) -> None:
        self.total = 0
        self._logged: set[tuple[str, str, str]] = set()

    def record(self, send: Send, error: Exception) -> Sequence[Unsent]:
        """One more; what the core is told, if the message belongs to a request.

        Of a receiver that there is not a core is told nothing: whoever named it so made it up.
        """
        self.total += 1
        reason, message = str(error)[:REASON_CHARS], send.message
        kind = (type(message).__name__, send.channel, send.to)
        if kind not in self._logged and len(self._logged) < MAX_LOG_LINES:
            self._logged.add(kind)
            to = send.to or "everyone"
            said = "%s for %s was not sent (said once): %s"
            log.error(said, kind[0], to, reason, extra=request_fields(message))
        request_id: object = getattr(message, "request_id", None)
        attempt: object = getattr(message, "attempt", None)
        if isinstance(error, NoSuchStage) or not isinstance(attempt, int):
            return ()
        return (Unsent(str(request_id), attempt, reason),)

"""Which trace a request belongs to, and the gateway's own span in it: what stages are told.

Draws no entropy, so that a replay names the same: ids are digests of the request's id, which is
unique, and of the process. Knows no HTTP beyond a header, and not who exports spans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pipeinfer import traceparent
from pipeinfer.traceparent import Traceparent

TRACEPARENT = "traceparent"
TRACE_DIGITS, SPAN_DIGITS = 32, 16  # hexadecimal digits


def client_traceparent(headers: Mapping[str, str]) -> str:
    """The client's W3C traceparent, or none."""
    given = headers.get(TRACEPARENT, "")
    return given if traceparent.read(given) is not None else ""


class RequestTraces:
    """`salt`: this process alone has it. `on`: whether spans are exported; else clients' traces are
    carried as they are."""

    def __init__(self, salt: str = "", on: bool = False) -> None:
        self._salt = salt
        self._on = on

    def traceparent(self, request_id: str, given: str) -> str:
        """The traceparent that the other stages get of a request whose client gave `given`. It
        names the gateway's span, in the client's trace or in a new one; of a trace that its client
        does not sample nothing is exported, and it is carried as it is."""
        client = traceparent.read(given)
        if not self._on or (client is not None and not client.sampled):
            return given
        digest = hashlib.sha256(f"{self._salt}/{request_id}".encode()).hexdigest()
        trace_id = digest[:TRACE_DIGITS] if client is None else client.trace_id
        return Traceparent(trace_id, digest[TRACE_DIGITS : TRACE_DIGITS + SPAN_DIGITS], True).text

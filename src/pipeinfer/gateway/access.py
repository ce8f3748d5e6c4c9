"""One line of the log for each request that a client sent to the pipeline.

Stands around all that answers it, so that it sees the status that the client sees. Knows no form of
an answer.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from pipeinfer import traceparent
from pipeinfer.gateway.admission import CLIENT_REQUEST, ClientRequest, is_protected
from pipeinfer.gateway.responses import GONE, Handler
from pipeinfer.gateway.tracing import RequestTraces, client_traceparent
from pipeinfer.runtime.logs import ACCESS

log = logging.getLogger(ACCESS)

REQUEST_ID = "x-request-id"
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_X_REQUEST_ID = web.RequestKey("name", str)


def x_request_id(request: web.Request) -> str:
    """What the answer calls the request in `x-request-id`: as its client does, if that is sane."""
    name = request.get(_X_REQUEST_ID, "")
    if not name:
        given = request.headers.get(REQUEST_ID, "")
        name = request[_X_REQUEST_ID] = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
    return name


class AccessLog:
    """`traces`: what the pipeline is told of traces."""

    def __init__(self, traces: RequestTraces, clock: Callable[[], float] = time.monotonic) -> None:
        self._traces = traces
        self._clock = clock

    def middleware(self) -> Middleware:
        """To stand before all others."""

        @web.middleware
        async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
            wanted = request.method == "POST" and is_protected(request.path)
            if not wanted or not log.isEnabledFor(logging.INFO):
                return await handler(request)
            began, status = self._clock(), GONE
            try:
                response = await handler(request)
                status = response.status
                return response
            finally:
                self._log_request(request, status, self._clock() - began)

        return access

    def _log_request(self, request: web.Request, status: int, seconds: float) -> None:
        client_request: ClientRequest | None = request.get(CLIENT_REQUEST)
        given = client_traceparent(request.headers)
        fields: dict[str, object] = {
            "method": request.method,
            "path": request.path,
            "x_request_id": x_request_id(request),
            "status": status,
            "seconds": round(seconds, 6),
            "outcome": "abort" if status == GONE else "refused",
        }
        prompt = output = 0
        if client_request is not None:
            usage = client_request.usage
            prompt, output = usage.prompt_tokens, usage.output_tokens
            given = self._traces.traceparent(usage.request_id, given) if usage.request_id else given
            fields |= {
                "request_id": usage.request_id,
                "key": client_request.client.name,
                "outcome": client_request.outcome,
                "finish": usage.finish,
                "prompt_tokens": prompt,
                "output_tokens": output,
            }
        parent = traceparent.read(given)
        if parent is not None:
            fields["trace_id"] = parent.trace_id
        log.info(
            "%s %s %d %s in %.3f s, %d prompt and %d output tokens, %s",
            request.method,
            request.path,
            status,
            fields["outcome"],
            seconds,
            prompt,
            output,
            fields.get("request_id") or "no request",
            extra=fields,
        )

"""The way of every request that the pipeline answers: its body in, its calls out, its answer back.

All endpoints share it. Knows no endpoint and no form of an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import quote

from aiohttp import web
from msgspec.structs import replace

from pipeinfer.gateway.access import name_of
from pipeinfer.gateway.admission import VISIT
from pipeinfer.gateway.bodies import Bodies
from pipeinfer.gateway.decoding import BodyType
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.events import Call, Delta, Failed, Started
from pipeinfer.gateway.intake import Intake
from pipeinfer.gateway.port import Sink
from pipeinfer.gateway.requests import ParsedRequest
from pipeinfer.gateway.response_encoders import ResponseEncoder
from pipeinfer.gateway.response_json import ResponseMetadata
from pipeinfer.gateway.service import Service
from pipeinfer.gateway.streams import EventStream, Turn, WholeAnswer, api_error
from pipeinfer.gateway.tokenizing import Encoded
from pipeinfer.gateway.tracing import carried

LEFT_OUT = web.RequestKey("left_out", str)  # of a request whose schema is not held in full
MOST_LEFT_OUT = 1_000  # letters
LETTERS = " !#$&'()*+,/:;=?@[]{}|<>"  # that a header has as they are

log = logging.getLogger(__name__)


class Answering:
    """Of one server."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._intake = Intake(Bodies(service.max_body_bytes), service.metrics.unknown_fields)
        self._turn = Turn()

    async def body(self, request: web.Request, kind: type[BodyType]) -> BodyType:
        """The checked body, read only if its request could be taken now."""
        self.check_room(1)
        body = await self._intake.take(request, kind)
        self.check_model(body.model)
        return body

    def said(self, name: str, job: ParsedRequest, chat: bool) -> ResponseMetadata:
        """What the answer called `name` says of itself."""
        return ResponseMetadata(
            chat=chat,
            id=name,
            created=int(time.time()),
            model=self.service.model,
            output_options=job.output_options,
            parser_factory=job.parser_factory,
            tool_call_options=job.tool_call_options,
            fingerprint=self.service.fingerprint,
        )

    async def respond(
        self, request: web.Request, job: ParsedRequest, outlet: ResponseEncoder
    ) -> web.StreamResponse:
        """Runs the job; `outlet` makes the answer."""
        self.check_room(job.choices)
        asked = job.constraint
        if asked.unenforced:
            _leave_out(request, asked.unenforced)
        sink = EventStream(outlet, self._turn) if job.stream else WholeAnswer(outlet)
        told = (
            _Refusals(sink, request, asked.lost_in_fallback) if asked.fallback is not None else sink
        )
        admission = self.service.admission
        admission.widen(request, job.prompts, job.choices)
        # Whatever still runs is hung up at the end, also when the handler is cancelled because the
        # client is gone.
        calls = self._owned(request, job.calls)
        try:
            async with self.service.port.opened(calls, admission.metered(request, told)):
                return await sink.respond(request)
        except ApiError as error:
            # Nobody behind the gateway knows which field has asked for the form.
            names = {"structured_outputs": asked.field} if asked.field else {}
            raise renamed(error, names) from None

    async def encoded(self, request: web.Request, call: Call) -> Started:
        """What the tokenizer says of a prompt that is only to be encoded."""
        sink = Encoded()
        admission = self.service.admission
        calls = self._owned(request, [call])
        async with self.service.port.opened(calls, admission.metered(request, sink)):
            return await sink.prompt()

    def _owned(self, request: web.Request, calls: Iterable[Call]) -> Iterator[Call]:
        """The calls, each with its client, which is also noted for those that look."""
        sight, client = self.service.sight, self.service.admission.client(request)
        for call in calls:
            if sight is not None:
                sight.own(call.request_id, request[VISIT].client.name)
            yield replace(call, client=client)

    def check_model(self, model: str | None) -> None:
        """ApiError 404 for another model than the one that is served; an empty name is none."""
        if model and model != self.service.model:
            message = (
                f"the model {model[:200]!r} does not exist; this server has {self.service.model!r}"
            )
            raise ApiError(404, message, "model", "model_not_found")

    def check_room(self, requests: int) -> None:
        """ApiError where so many more requests would not be taken now."""
        refusal = self.service.core.refusal(requests=requests)
        if refusal is not None:
            self.service.metrics.ended("refused")
            raise api_error(refusal)


class _Refusals:
    """A sink in front of another, of a request that is served although its grammar is refused: says
    so before the answer's headers leave. `loses`: what the answer is not held to then."""

    __slots__ = ("_loses", "_request", "_sink")

    def __init__(self, sink: Sink, request: web.Request, loses: str) -> None:
        self._sink = sink
        self._request = request
        self._loses = loses

    def started(self, index: int, started: Started) -> None:
        if started.refusal:
            _leave_out(self._request, (f"{self._loses}: {started.refusal}",))
        self._sink.started(index, started)

    def delta(self, index: int, delta: Delta) -> None:
        self._sink.delta(index, delta)

    def failed(self, index: int, failed: Failed) -> None:
        self._sink.failed(index, failed)


def _leave_out(request: web.Request, places: Sequence[str]) -> None:
    """Says in a header, and in the log, what the answer is not held to."""
    # Names of properties are the client's: no log has them, a header takes ASCII only.
    request[LEFT_OUT] = quote("; ".join(places), LETTERS)[:MOST_LEFT_OUT]
    keywords = sorted({each.partition(" ")[0] for each in places})
    log.info("%s: its answer is not held to %s", name_of(request), ", ".join(keywords))


def trace(request: web.Request) -> str:
    """The client's W3C traceparent, or none."""
    return carried(request.headers)

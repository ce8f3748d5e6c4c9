"""The endpoints that speak otherwise than chat completions, and the form of their errors.

Knows which body, which speech and which errors belong together.
"""

from __future__ import annotations

import re
import uuid

import msgspec
from aiohttp import web

from pipeinfer.gateway.answering import Answering, trace
from pipeinfer.gateway.dialects import messages_body, messages_events, responses_body
from pipeinfer.gateway.dialects.dialect import SpeechOutlet, dialect_job
from pipeinfer.gateway.dialects.messages_body import CountRequest, MessagesRequest
from pipeinfer.gateway.dialects.messages_events import MessageSpeech
from pipeinfer.gateway.dialects.responses_body import ResponsesRequest
from pipeinfer.gateway.dialects.responses_events import ResponseSpeech
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.responses import Handler, error_response, json_response
from pipeinfer.gateway.tokenizing import prompt_call

MESSAGES = re.compile("/+v1/+messages(/+count_tokens)?")  # routes take several slashes for one


class DialectHandlers:
    """Handlers by path."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._terms = answering.service.terms

    def routes(self) -> dict[str, Handler]:
        """All of them are for POST."""
        return {
            "/v1/responses": self.responses,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
        }

    async def responses(self, request: web.Request) -> web.StreamResponse:
        base = f"resp_{uuid.uuid4().hex}"
        body = await self._answering.body(request, ResponsesRequest)
        names = responses_body.NAMES
        job = dialect_job(responses_body.as_chat(body), base, self._terms, trace(request), names)
        answer = self._answering.said(base, job, chat=True)
        speech = ResponseSpeech(body, answer, job.params)
        del body  # an answer takes minutes, in which the core has all that is needed
        outlet = SpeechOutlet(answer, speech, job.stream)
        return await self._answering.respond(request, job, outlet)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        base = f"msg_{uuid.uuid4().hex}"
        body = await self._answering.body(request, MessagesRequest)
        names = messages_body.NAMES
        reading = self._terms.reading
        chat = messages_body.as_chat(body, bool(reading.reasoning), reading.harmony)
        job = dialect_job(chat, base, self._terms, trace(request), names)
        omits = body.thinking is not None and body.thinking.display == "omitted"
        del body, chat
        answer = self._answering.said(base, job, chat=True)
        outlet = SpeechOutlet(answer, MessageSpeech(answer, omits), job.stream)
        return await self._answering.respond(request, job, outlet)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._answering.body(request, CountRequest)
        chat = messages_body.conversation(body, self._terms.reading.harmony)
        try:
            call = prompt_call(chat, f"tok-{uuid.uuid4().hex}", self._terms)
        except ApiError as error:
            raise renamed(error, messages_body.NAMES) from None
        prompt = await self._answering.encoded(request, call)
        return json_response({"input_tokens": prompt.prompt_tokens})


def error_in_dialect(request: web.Request, error: ApiError) -> web.Response:
    """`error` in the form that clients of the request's path read."""
    response = error_response(error)
    if MESSAGES.fullmatch(request.path):
        response.body = msgspec.json.encode(messages_events.error_object(error))
        response.set_status(messages_events.status_of(error))
    return response

"""The endpoints that speak otherwise than chat completions, and the form of their errors.

Knows which body, which speech and which errors belong together.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import msgspec
from aiohttp import web
from msgspec.structs import replace

from pipeinfer.gateway.auth import x_request_id
from pipeinfer.gateway.dialects import messages_body, messages_events, responses_body
from pipeinfer.gateway.dialects.dialect import SpeechOutlet, dialect_job
from pipeinfer.gateway.dialects.messages_body import CountRequest, MessagesRequest
from pipeinfer.gateway.dialects.messages_events import MessageSpeech
from pipeinfer.gateway.dialects.responses_body import (
    InputTokensRequest,
    PromptOfResponse,
    Responses,
    ResponsesRequest,
)
from pipeinfer.gateway.dialects.responses_events import ResponseSpeech
from pipeinfer.gateway.errors import ApiError, Handler, error_response, json_response, renamed
from pipeinfer.gateway.requests import Job
from pipeinfer.gateway.serving import Serving, client_trace, prompt_call

# Also what is not there, below it. Routes take several slashes for one.
MESSAGES = re.compile("/+v1/+messages(/.*)?", re.DOTALL)
TOO_LONG = "context_length_exceeded"


class DialectHandlers:
    """Handlers by path."""

    def __init__(self, answering: Serving) -> None:
        self._answering = answering
        self._terms = answering.service.terms

    def routes(self) -> dict[str, Handler]:
        """All of them are for POST."""
        return {
            "/v1/responses": self.responses,
            "/v1/responses/input_tokens": self.input_tokens,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
        }

    async def responses(self, request: web.Request) -> web.StreamResponse:
        base = f"resp_{uuid.uuid4().hex}"
        body = await self._answering.read_body(request, ResponsesRequest)
        job, outlet = self._response(request, base, body)
        whole = body if body.truncation == "auto" else None
        del body  # an answer takes minutes, in which the core has all that is needed
        with in_words(responses_body.NAMES):
            try:
                return await self._answering.respond(request, job, outlet)
            except ApiError as error:  # before anything was sent
                if whole is None:
                    raise
                whole = await self._shortened(request, whole, error, whole.max_output_tokens)
            job, outlet = self._response(request, base, whole)
            return await self._answering.respond(request, job, outlet)

    def _response(
        self, request: web.Request, base: str, body: ResponsesRequest
    ) -> tuple[Job, SpeechOutlet]:
        names = responses_body.NAMES
        job = dialect_job(
            responses_body.as_chat(body), base, self._terms, client_trace(request), names
        )
        answer = self._answering.new_answer(base, job, chat=True)
        speech = ResponseSpeech(body, answer, job.params)
        return job, SpeechOutlet(answer, speech, job.stream)

    async def input_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._answering.read_body(request, InputTokensRequest)
        with in_words(responses_body.NAMES):
            try:
                tokens = await self._count(request, body, 1 if body.truncation == "auto" else 0)
            except ApiError as error:
                tokens = await self._count(
                    request, await self._shortened(request, body, error, 1), 1
                )
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def _count(self, request: web.Request, body: PromptOfResponse, room: int | None) -> int:
        """Tokens of the prompt, which leaves `room` for an answer; None: for one of any length; 0:
        the prompt may be longer than the context."""
        chat = responses_body.prompt_chat(body)
        call = prompt_call(chat, f"tok-{uuid.uuid4().hex}", self._terms)
        call = replace(call, params=replace(call.params, max_tokens=room))
        return (await self._answering.encode_prompt(request, call)).prompt_tokens

    async def _shortened(
        self, request: web.Request, body: Responses, error: ApiError, room: int | None
    ) -> Responses:
        """`body`, which was refused with `error`, with as few of the first turns left out as it
        takes to fit; `error` again where it asks for no such thing, or no turn can be left out."""
        turns = responses_body.turns(body) if error.code == TOO_LONG else []
        found: Responses | None = None
        first, behind = 0, len(turns)
        while first < behind:
            middle = (first + behind) // 2
            shorter = responses_body.beginning(body, turns[middle])
            try:
                await self._count(request, shorter, room)
                found, behind = shorter, middle
            except ApiError as still:
                if still.code != TOO_LONG:
                    raise
                first = middle + 1
        if found is None:
            raise error
        return found

    async def messages(self, request: web.Request) -> web.StreamResponse:
        base = f"msg_{uuid.uuid4().hex}"
        body = await self._answering.read_body(request, MessagesRequest)
        names = messages_body.NAMES
        reading = self._terms.reading
        chat = messages_body.as_chat(body, bool(reading.reasoning), reading.harmony)
        job = dialect_job(chat, base, self._terms, client_trace(request), names)
        omits = body.thinking is not None and body.thinking.display == "omitted"
        del body, chat
        answer = self._answering.new_answer(base, job, chat=True)
        speech = MessageSpeech(answer, omits, x_request_id(request))
        outlet = SpeechOutlet(answer, speech, job.stream)
        with in_words(names):
            return await self._answering.respond(request, job, outlet)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._answering.read_body(request, CountRequest)
        chat = messages_body.conversation(body, self._terms.reading.harmony)
        with in_words(messages_body.NAMES):
            call = prompt_call(chat, f"tok-{uuid.uuid4().hex}", self._terms)
            prompt = await self._answering.encode_prompt(request, call)
        return json_response({"input_tokens": prompt.prompt_tokens})


@contextmanager
def in_words(names: Mapping[str, str]) -> Generator[None]:
    """Errors name the fields as a dialect calls them: `names` by those of chats."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, names) from None


def error_in_dialect(request: web.Request, error: ApiError) -> web.Response:
    """`error` in the form that clients of the request's path read."""
    response = error_response(error)
    if MESSAGES.fullmatch(request.path):
        told = messages_events.error_object(error, x_request_id(request))
        response.body = msgspec.json.encode(told)
        response.set_status(messages_events.status_of(error))
    return response

"""The handlers of /v1/responses and /v1/messages, and the form of their errors.

Each joins the body, the formatter and the field names of one API adapter.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import msgspec
from aiohttp import web
from msgspec.structs import replace

from pipeinfer.gateway import anthropic, responses_api
from pipeinfer.gateway.adapter import AdapterEncoder, parse_adapted_chat
from pipeinfer.gateway.anthropic import CountRequest, MessagesFormatter, MessagesRequest
from pipeinfer.gateway.auth import x_request_id
from pipeinfer.gateway.errors import ApiError, Handler, error_response, json_response, renamed
from pipeinfer.gateway.requests import ParsedRequest
from pipeinfer.gateway.responses_api import (
    InputTokensRequest,
    ResponsesBody,
    ResponsesFormatter,
    ResponsesPrompt,
    ResponsesRequest,
)
from pipeinfer.gateway.serving import Serving, client_trace, prompt_call

# Also what is not there, below it. Routes take several slashes for one.
MESSAGES_PATHS = re.compile("/+v1/+messages(/.*)?", re.DOTALL)
TOO_LONG = "context_length_exceeded"


class AdapterHandlers:
    """Handlers by path."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._terms = serving.service.terms

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
        body = await self._serving.read_body(request, ResponsesRequest)
        job, encoder = self._response(request, base, body)
        full_body = body if body.truncation == "auto" else None
        del body  # an answer takes minutes, in which the core has all that is needed
        with with_field_names(responses_api.FIELD_NAMES):
            try:
                return await self._serving.respond(request, job, encoder)
            except ApiError as error:  # before anything was sent
                if full_body is None:
                    raise
                full_body = await self._truncated(
                    request, full_body, error, full_body.max_output_tokens
                )
            job, encoder = self._response(request, base, full_body)
            return await self._serving.respond(request, job, encoder)

    def _response(
        self, request: web.Request, base: str, body: ResponsesRequest
    ) -> tuple[ParsedRequest, AdapterEncoder]:
        names = responses_api.FIELD_NAMES
        job = parse_adapted_chat(
            responses_api.to_chat(body), base, self._terms, client_trace(request), names
        )
        answer = self._serving.new_answer(base, job, chat=True)
        formatter = ResponsesFormatter(body, answer, job.params)
        return job, AdapterEncoder(answer, formatter, job.stream)

    async def input_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read_body(request, InputTokensRequest)
        with with_field_names(responses_api.FIELD_NAMES):
            try:
                tokens = await self._count(request, body, 1 if body.truncation == "auto" else 0)
            except ApiError as error:
                tokens = await self._count(
                    request, await self._truncated(request, body, error, 1), 1
                )
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def _count(
        self, request: web.Request, body: ResponsesPrompt, answer_tokens: int | None
    ) -> int:
        """Tokens of the prompt. `answer_tokens`: that must fit behind it; None: any number; 0: the
        prompt may be longer than the context.
        """
        chat = responses_api.to_prompt_chat(body)
        call = prompt_call(chat, f"tok-{uuid.uuid4().hex}", self._terms)
        call = replace(call, params=replace(call.params, max_tokens=answer_tokens))
        return (await self._serving.encode_prompt(request, call)).prompt_tokens

    async def _truncated(
        self, request: web.Request, body: ResponsesBody, error: ApiError, answer_tokens: int | None
    ) -> ResponsesBody:
        """`body`, refused with `error`, without as few of the first turns as it takes to fit.
        Raises `error` if the request does not allow that, or no turn can be left out.
        """
        message_starts = responses_api.message_starts(body) if error.code == TOO_LONG else []
        found: ResponsesBody | None = None
        low, high = 0, len(message_starts)
        while low < high:
            middle = (low + high) // 2
            shorter = responses_api.without_items_before(body, message_starts[middle])
            try:
                await self._count(request, shorter, answer_tokens)
                found, high = shorter, middle
            except ApiError as still:
                if still.code != TOO_LONG:
                    raise
                low = middle + 1
        if found is None:
            raise error
        return found

    async def messages(self, request: web.Request) -> web.StreamResponse:
        base = f"msg_{uuid.uuid4().hex}"
        body = await self._serving.read_body(request, MessagesRequest)
        names = anthropic.FIELD_NAMES
        parsers = self._terms.parsers
        chat = anthropic.to_chat(body, bool(parsers.reasoning_parser_name), parsers.harmony)
        job = parse_adapted_chat(chat, base, self._terms, client_trace(request), names)
        omit_reasoning = body.thinking is not None and body.thinking.display == "omitted"
        del body, chat
        answer = self._serving.new_answer(base, job, chat=True)
        formatter = MessagesFormatter(answer, omit_reasoning, x_request_id(request))
        encoder = AdapterEncoder(answer, formatter, job.stream)
        with with_field_names(names):
            return await self._serving.respond(request, job, encoder)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read_body(request, CountRequest)
        chat = anthropic.to_prompt_chat(body, self._terms.parsers.harmony)
        with with_field_names(anthropic.FIELD_NAMES):
            call = prompt_call(chat, f"tok-{uuid.uuid4().hex}", self._terms)
            prompt = await self._serving.encode_prompt(request, call)
        return json_response({"input_tokens": prompt.prompt_tokens})


@contextmanager
def with_field_names(names: Mapping[str, str]) -> Generator[None]:
    """Errors name the fields as the adapter calls them. `names`: by those of chats."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, names) from None


def adapted_error_response(request: web.Request, error: ApiError) -> web.Response:
    """`error` in the form that clients of the request's path read."""
    response = error_response(error)
    if MESSAGES_PATHS.fullmatch(request.path):
        body = anthropic.error_object(error, x_request_id(request))
        response.body = msgspec.json.encode(body)
        response.set_status(anthropic.status_of(error))
    return response

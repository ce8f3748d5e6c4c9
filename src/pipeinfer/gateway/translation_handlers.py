"""Handlers of the APIs that are translated: /v1/responses and /v1/messages, and the paths below.

    TranslationHandlers   each joins the body, the formatter and the field names of one API
    ResponseMemory        the memory of /v1/responses: what is stored of a response, and how a
                          conversation goes on. Without a store there is no memory: nothing is
                          stored, and requests that need it are refused

Knows no route but its own.
"""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial

import msgspec
from aiohttp import web
from msgspec.structs import replace

from pipeinfer.gateway import anthropic, responses_api
from pipeinfer.gateway.anthropic import CountRequest, MessagesFormatter, MessagesRequest
from pipeinfer.gateway.auth import x_request_id
from pipeinfer.gateway.errors import ApiError, Handler, json_response, renamed
from pipeinfer.gateway.response_encoders import Settle
from pipeinfer.gateway.response_store import (
    ConversationBroken,
    ConversationTooLarge,
    StoredResponse,
)
from pipeinfer.gateway.responses_api import (
    InputItem,
    InputTokensRequest,
    ResponsesBody,
    ResponsesFormatter,
    ResponsesPrompt,
    ResponsesRequest,
    items_of,
    stored_items,
)
from pipeinfer.gateway.resumable_answers import MessagesForm, ResponsesForm, RetainedResponse
from pipeinfer.gateway.schema import MAX_MESSAGES
from pipeinfer.gateway.serving import HandlerContext, Serving, chat_prompt_call, client_trace
from pipeinfer.gateway.translation import TranslatedEncoder, parse_translated_chat

log = logging.getLogger(__name__)

TOO_LONG = "context_length_exceeded"
PREVIOUS = "previous_response_id"
NO_STORE = f"{PREVIOUS} is not supported by this server, which runs without --store"
_json = msgspec.json.Encoder()


class TranslationHandlers:
    """Handlers of /v1/responses and /v1/messages."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._memory = ResponseMemory(serving.context)
        self._defaults = serving.context.defaults

    def routes(self) -> dict[str, Handler]:
        """Handlers by path, all for POST."""
        return {
            "/v1/responses": self.responses,
            "/v1/responses/input_tokens": self.input_tokens,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
        }

    async def responses(self, request: web.Request) -> web.StreamResponse:
        request_id = f"resp_{uuid.uuid4().hex}"
        given = await self._serving.read_body(request, ResponsesRequest)
        body = await self._memory.with_history(request, given)
        run = self._response(request, request_id, body, given)
        full_body = body if body.truncation == "auto" else None
        del body  # is not kept for the minutes that an answer may take
        if full_body is None:
            del given
            with with_field_names(responses_api.FIELD_NAMES):
                return await run()
        with with_field_names(responses_api.FIELD_NAMES):
            try:
                return await run()
            except ApiError as error:  # before anything was sent
                full_body = await self._truncated(
                    request, full_body, error, full_body.max_output_tokens
                )
            return await self._response(request, request_id, full_body, given)()

    def _response(
        self,
        request: web.Request,
        request_id: str,
        body: ResponsesRequest,
        given: ResponsesRequest,
    ) -> Callable[[], Awaitable[web.StreamResponse]]:
        """What answers `body`: the body as it was `given`, with what stands before it."""
        names = responses_api.FIELD_NAMES
        parsed = parse_translated_chat(
            responses_api.to_chat(body), request_id, self._defaults, client_trace(request), names
        )
        metadata = self._serving.response_metadata(request_id, parsed, chat=True)
        stored = self._memory.stores(body)
        fields = responses_api.echoed_fields(body, metadata, parsed.params, stored)
        formatter = ResponsesFormatter(fields, metadata)
        response = RetainedResponse(formatter, bool(body.background), body.input)
        memory = self._memory.stored_form(given)
        form = ResponsesForm(fields, response.background, body.input, *memory)
        retention = self._serving.retention(request, parsed, metadata, responses=form)
        if retention is not None:
            retention = dataclasses.replace(retention, response=response)
        streams = parsed.stream or retention is not None
        encoder = TranslatedEncoder(metadata, formatter, streams)
        settle = self._memory.settle(self._serving.owner(request), *memory, formatter)
        return partial(self._serving.respond, request, parsed, encoder, retention, settle)

    async def input_tokens(self, request: web.Request) -> web.StreamResponse:
        given = await self._serving.read_body(request, InputTokensRequest)
        body = await self._memory.with_history(request, given)
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
        call = chat_prompt_call(chat, f"tok-{uuid.uuid4().hex}", self._defaults)
        call = replace(call, params=replace(call.params, max_tokens=answer_tokens))
        return (await self._serving.encode_prompt(request, call)).prompt_tokens

    async def _truncated(
        self, request: web.Request, body: ResponsesBody, error: ApiError, answer_tokens: int | None
    ) -> ResponsesBody:
        """`body`, which was refused with `error`, without the first turns that must be left out for
        it to fit. Raises `error` if the request does not allow that, or no turn can be left out.
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
            except ApiError as refusal:
                if refusal.code != TOO_LONG:
                    raise
                low = middle + 1
        if found is None:
            raise error
        return found

    async def messages(self, request: web.Request) -> web.StreamResponse:
        request_id = f"msg_{uuid.uuid4().hex}"
        body = await self._serving.read_body(request, MessagesRequest)
        names = anthropic.FIELD_NAMES
        parsers = self._defaults.parsers
        chat = anthropic.to_chat(body, bool(parsers.reasoning_parser_name), parsers.harmony)
        parsed = parse_translated_chat(
            chat, request_id, self._defaults, client_trace(request), names
        )
        omit_reasoning = body.thinking is not None and body.thinking.display == "omitted"
        del body, chat
        metadata = self._serving.response_metadata(request_id, parsed, chat=True)
        formatter = MessagesFormatter(metadata, omit_reasoning, x_request_id(request))
        encoder = TranslatedEncoder(metadata, formatter, parsed.stream)
        form = MessagesForm(omit_reasoning, x_request_id(request))
        retention = self._serving.retention(request, parsed, metadata, messages=form)
        with with_field_names(names):
            return await self._serving.respond(request, parsed, encoder, retention)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read_body(request, CountRequest)
        chat = anthropic.to_prompt_chat(body, self._defaults.parsers.harmony)
        with with_field_names(anthropic.FIELD_NAMES):
            call = chat_prompt_call(chat, f"tok-{uuid.uuid4().hex}", self._defaults)
            prompt = await self._serving.encode_prompt(request, call)
        return json_response({"input_tokens": prompt.prompt_tokens})


@contextmanager
def with_field_names(names: Mapping[str, str]) -> Generator[None]:
    """Errors name the fields as the API calls them. `names`: by those of chats."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, names) from None


class ResponseMemory:
    """Stores responses, and finds them for the key that asked for them."""

    def __init__(self, context: HandlerContext) -> None:
        self._store = context.store
        self._admission = context.admission
        self._errors = context.metrics.store_errors
        self._max_bytes = context.max_body_bytes

    def stores(self, body: ResponsesRequest) -> bool:
        """Whether the response to `body` is stored."""
        return self._store is not None and body.store is not False

    async def with_history(self, request: web.Request, body: ResponsesBody) -> ResponsesBody:
        """`body` with the conversation before it in its input. Raises ApiError 400, 500."""
        if not body.previous_response_id:
            return body
        if self._store is None:
            raise ApiError(400, NO_STORE, PREVIOUS, "unsupported_parameter")
        before = await self._conversation(request, body.previous_response_id)
        return replace(body, input=[*before, *items_of(body.input)])

    def stored_form(self, body: ResponsesRequest) -> tuple[bytes, str]:
        """Of `body`, as it came: JSON of its items, and the id of the response before it. Empty if
        the response is not stored."""
        if not self.stores(body):
            return b"", ""
        given = _json.encode([_given(item) for item in items_of(body.input)])
        return given, body.previous_response_id or ""

    def settle(
        self, owner: str, given: bytes, previous: str, formatter: ResponsesFormatter
    ) -> Settle | None:
        """What stores a response when `formatter` has all of it; None if it is not stored. owner:
        name of the key that asked for it. given, previous: of stored_form."""
        if self._store is None or not given:
            return None
        return partial(self._put, owner, previous, given, formatter)

    async def find(self, request: web.Request, name: str) -> StoredResponse | None:
        """The response, if whoever sent `request` may have it."""
        if self._store is None:
            return None
        with _store_errors():
            return await self._store.get(name, self._admission.principal(request).name)

    async def delete(self, request: web.Request, name: str) -> bool:
        """Whether it was stored."""
        if self._store is None:
            return False
        with _store_errors():
            return await self._store.delete(name, self._admission.principal(request).name)

    async def input_of(self, request: web.Request, stored: StoredResponse) -> list[InputItem]:
        """Of what the prompt of a stored response was made."""
        before: list[InputItem] = []
        if stored.previous:
            before = await self._conversation(request, stored.previous)
        return [*before, *msgspec.json.decode(stored.input, type=list[InputItem])]

    async def _conversation(self, request: web.Request, last: str) -> list[InputItem]:
        assert self._store is not None
        owner, bounds = self._admission.principal(request).name, (MAX_MESSAGES, self._max_bytes)
        try:
            with _store_errors():
                found = await self._store.conversation(last, owner, *bounds)
        except ConversationBroken as error:
            message = f"no response {error.id[:200]!r} is stored"
            raise ApiError(400, message, PREVIOUS, "previous_response_not_found") from None
        except ConversationTooLarge:
            message = f"the conversation of {PREVIOUS} is too long"
            raise ApiError(400, message, PREVIOUS, "invalid_value") from None
        return [item for stored in found for item in stored_items(stored)]

    async def _put(
        self, owner: str, previous: str, given: bytes, formatter: ResponsesFormatter
    ) -> None:
        """A response that cannot be stored is answered all the same: it took long to compute."""
        response = formatter.final
        if self._store is None or response is None:
            return
        stored = StoredResponse(
            id=str(response["id"]),
            owner=owner,
            previous=previous,
            response=_json.encode(response),
            input=given,
        )
        try:
            await self._store.put(stored)
        except sqlite3.Error as error:
            self._errors.inc()
            log.error("the response %s is not stored: %s", stored.id, error)


def _given(item: InputItem) -> dict[str, object]:
    return {
        name: value for name, value in msgspec.structs.asdict(item).items() if value is not None
    }


@contextmanager
def _store_errors() -> Generator[None]:
    """An error of the store is the server's."""
    try:
        yield
    except sqlite3.Error as error:
        log.error("stored responses cannot be read: %s", error)
        raise ApiError(500, "stored responses cannot be read", code="store_failed") from None

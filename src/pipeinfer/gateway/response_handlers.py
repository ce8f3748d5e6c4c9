"""Handlers of answers that may outlive their connection: /v1/responses, /v1/messages, /v1/streams
and the paths below.

    TranslationHandlers   /v1/responses and /v1/messages: each joins the body, the formatter and the
                          field names of one API that is translated
    ResponseMemory        the memory of /v1/responses: what is stored of a response, and how a
                          conversation goes on. Without a store there is no memory: nothing is
                          stored, and requests that need it are refused
    ResumableHandlers     streams and responses by their ids: only the key that asked for an answer
                          finds it; without keys, every client that knows its id
    Adopter               adopts answers and adapters of the gateway before. The core says which
                          requests it has adopted (Adopt), then delivers their text from the
                          beginning. So an adopted answer is written as one that this gateway was
                          asked for; only its head was sent already
"""

from __future__ import annotations

import dataclasses
import logging
import re
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
from pipeinfer.gateway.ledger import AdoptionEnded
from pipeinfer.gateway.peers import is_forwarded
from pipeinfer.gateway.response_encoders import Settle
from pipeinfer.gateway.responses_api import (
    InputItem,
    InputTokensRequest,
    ResponsesBody,
    ResponsesFormatter,
    ResponsesPrompt,
    ResponsesRequest,
    input_items,
    items_of,
    stored_items,
)
from pipeinfer.gateway.resumable_answers import (
    AnswerRetention,
    MessagesForm,
    ResponsesForm,
    ResumableAnswer,
    RetainedResponse,
    decode_format,
    encoder_for,
    gone,
)
from pipeinfer.gateway.retention import (
    ConversationBroken,
    ConversationTooLarge,
    ResumableStream,
    RetentionPolicy,
    StoredResponse,
    StreamGone,
    StreamUnknown,
    parse_event_id,
)
from pipeinfer.gateway.schema import MAX_MESSAGES
from pipeinfer.gateway.serving import HandlerContext, Serving, chat_prompt_call, client_trace
from pipeinfer.gateway.sessions import AdoptedSession, ResponseSink
from pipeinfer.gateway.translation import TranslatedEncoder, parse_translated_chat
from pipeinfer.messages import AdapterChanges, Adopt, Retention
from pipeinfer.params import JsonObject, choice_ids

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
        """A function that answers `body`, which is the body as it was `given`, behind the
        conversation before it."""
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
        """The stored form of `body`, as it came: JSON of its items, and the id of the response
        before it. (b"", "") if the response is not stored."""
        if not self.stores(body):
            return b"", ""
        given = _json.encode([_given(item) for item in items_of(body.input)])
        return given, body.previous_response_id or ""

    def settle(
        self, owner: str, given: bytes, previous: str, formatter: ResponsesFormatter
    ) -> Settle | None:
        """A function that stores a response once `formatter` has all of it; None if it is not
        stored.

        - owner: name of the key that asked for it
        - given, previous: of stored_form
        """
        if self._store is None or not given:
            return None
        return partial(self._put, owner, previous, given, formatter)

    async def find(self, request: web.Request, name: str) -> StoredResponse | None:
        """The response, if the sender of `request` may have it; else None."""
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
        """The items of which the prompt of a stored response was made."""
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


LAST_EVENT_ID = "Last-Event-ID"
NUMBER = re.compile(r"[0-9]{1,15}")
# A path's last part that names a response: /v1/responses/input_tokens is an endpoint of its own.
RESPONSE_ID = "(?!input_tokens$)[^{}/]+"
MAX_ITEMS = 100  # items of a page of /input_items
DEFAULT_ITEMS = 20
NOT_BACKGROUND = "only responses that were created with background: true can be cancelled"


class ResumableHandlers:
    """Handlers of /v1/streams/{id}, and of /v1/responses/{id} and below."""

    def __init__(self, context: HandlerContext) -> None:
        self._answers = context.answers
        self._memory = ResponseMemory(context)
        self._admission = context.admission
        self._siblings = context.siblings

    def route(self, router: web.UrlDispatcher, path: Callable[[str], str]) -> None:
        """Registers the handlers. path(): the route for a path."""
        stream, response = path("/v1/streams/{id}"), path("/v1/responses/")
        response += f"{{id:{RESPONSE_ID}}}"
        router.add_route("DELETE", response, self.delete)
        for method, route, handler in (
            ("GET", stream, self.stream),
            ("DELETE", stream, self.end_stream),
            ("GET", response, self.response),
            ("POST", path("/v1/responses/{id}/cancel"), self.cancel),
            ("GET", path("/v1/responses/{id}/input_items"), self.input_items),
        ):
            router.add_route(method, route, self._at_any_gateway(handler))

    def _at_any_gateway(self, handler: Handler) -> Handler:
        """`handler`; what this gateway does not have is asked of the others."""

        async def ask(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except ApiError as error:
                if error.status != 404:
                    raise
                found = await self._siblings.forward(request)
                if found is None:
                    raise
                return found

        return ask

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Goes on behind the event that the header Last-Event-ID names; begins without it."""
        answer = await self._answers.find(request.match_info["id"], self._owner(request))
        had = events_of(request.headers.get(LAST_EVENT_ID, ""), answer.stream)
        return await self._answers.stream(request, answer.stream, had)

    async def end_stream(self, request: web.Request) -> web.StreamResponse:
        """Forgets a stream; one that runs is aborted."""
        name = request.match_info["id"]
        await self._answers.delete(await self._answers.find(name, self._owner(request)))
        return json_response({"id": name, "object": "stream", "deleted": True})

    async def response(self, request: web.Request) -> web.StreamResponse:
        """The response as far as it is, or its stream."""
        streams = request.query.get("stream", "").lower() in ("true", "1")
        answer = await self._find(request, stored_is_enough=not streams)
        if not streams:
            return await self._as_it_is(request, answer)
        if answer is None:
            name = (await self._stored(request)).id
            found = await self._siblings.forward(request)
            if found is not None:
                return found
            raise gone(name, StreamGone("the response is stored, and its events are not"))
        after = _number(request, "starting_after", -1)
        return await self._answers.stream(request, answer.stream, (after + 1,))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """Ends a background response; one that has ended stays as it is."""
        answer = await self._find(request)
        if answer is not None:
            background = (
                answer.retained_response is not None and answer.retained_response.background
            )
        else:
            stored = msgspec.json.decode((await self._stored(request)).response)
            background = stored["background"]
        if not background:
            raise ApiError(400, NOT_BACKGROUND, code="invalid_value")
        if answer is not None:
            await self._answers.cancel(answer)
        return await self._as_it_is(request, answer)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """Forgets a response; one that runs is aborted."""
        name = request.match_info["id"]
        answer = await self._find(request, stored_is_enough=False)
        if answer is not None:
            await self._answers.delete(answer)
        elif is_forwarded(request):
            raise _no_response(name)
        else:  # another gateway may keep it, though it is stored
            found = await self._siblings.forward(request)
            if found is not None:
                return found
        if not await self._memory.delete(request, name) and answer is None:
            raise _no_response(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: web.Request) -> web.StreamResponse:
        """The items of which the response's prompt was made."""
        answer, name = await self._find(request), request.match_info["id"]
        if answer is not None and answer.retained_response is not None:
            given = answer.retained_response.input
        else:
            given = await self._memory.input_of(request, await self._stored(request))
        return json_response(_page(input_items(given, name), request))

    def _owner(self, request: web.Request) -> str:
        return self._admission.owner(request)

    async def _find(
        self, request: web.Request, *, stored_is_enough: bool = True
    ) -> ResumableAnswer | None:
        """The retained response; None if there is none. Raises ApiError 503 while that is not
        known, unless it is stored and that is enough."""
        name, owner = request.match_info["id"], self._owner(request)
        try:
            answer = await self._answers.answer(name, owner)
        except (StreamUnknown, StreamGone):
            return None
        except ApiError:
            enough = stored_is_enough and not is_forwarded(request)
            if not enough or await self._memory.find(request, name) is None:
                raise
            return None
        return None if answer.retained_response is None else answer

    async def _stored(self, request: web.Request) -> StoredResponse:
        """The stored response. Raises ApiError 404, also to another gateway, which has the same
        store."""
        name = request.match_info["id"]
        stored = None if is_forwarded(request) else await self._memory.find(request, name)
        if stored is None:
            raise _no_response(name)
        return stored

    async def _as_it_is(
        self, request: web.Request, answer: ResumableAnswer | None
    ) -> web.StreamResponse:
        if answer is not None:
            return json_response(answer.response())
        stored = await self._stored(request)
        return web.Response(body=stored.response, content_type="application/json")


def _no_response(name: str) -> ApiError:
    message = f"there is no response {name[:200]!r}"
    return ApiError(404, message, code="response_not_found")


def events_of(given: str, stream: ResumableStream) -> tuple[int, ...]:
    """How many events of each partition a client has that sends the header Last-Event-ID; empty
    without it. Raises ApiError 400."""
    if not given:
        return ()
    name, _, number = given.rpartition("/")
    had = parse_event_id(number) if name == stream.name else None
    if had is None or len(had) != len(stream.counts):
        message = f"{LAST_EVENT_ID} must be an id of this stream's events: {stream.name}/NUMBER"
        raise ApiError(400, message, LAST_EVENT_ID, "invalid_value")
    return (had[0] + 1,) if len(had) == 1 else had


def _number(request: web.Request, name: str, default: int) -> int:
    given = request.query.get(name)
    if given is None:
        return default
    if NUMBER.fullmatch(given) is None:
        raise ApiError(400, f"{name} must be a number, 0 or more", name, "invalid_value")
    return int(given)


def _page(items: list[JsonObject], request: web.Request) -> JsonObject:
    """A page of items, as OpenAI's lists are. Raises ApiError 400."""
    limit, order = _number(request, "limit", DEFAULT_ITEMS), request.query.get("order", "desc")
    if not 1 <= limit <= MAX_ITEMS:
        raise ApiError(400, f"limit must be 1 to {MAX_ITEMS}", "limit", "invalid_value")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", "order", "invalid_value")
    if order == "desc":
        items = items[::-1]
    after = request.query.get("after")
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ApiError(400, "after is no id of an item", "after", "invalid_value")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": [*page],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


class _Adopted:
    """An answer that is being adopted.

    Attributes:
    - choices: that it has
    - known: those that have come
    - metered: the sink of what is new
    """

    def __init__(
        self, answer: ResumableAnswer, session: AdoptedSession, choices: int, metered: ResponseSink
    ) -> None:
        self.answer = answer
        self.session = session
        self.choices = choices
        self.known: set[int] = set()
        self.metered = metered


class Adopter:
    """Adopts answers and adapters. An answer that this gateway cannot write, whose key is no more,
    or of which a choice is lost is aborted, and so is one for which there is no room."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._memory = ResponseMemory(context)
        self._adopted: dict[str, _Adopted | None] = {}  # by stream; None: refused

    def on_message(self, message: Adopt | AdoptionEnded | AdapterChanges) -> None:
        """Takes what the core has adopted."""
        if isinstance(message, Adopt):
            self._on_adopt(message)
        elif isinstance(message, AdapterChanges):
            self._context.defaults.adapters.adopt(message)
        else:
            self._on_end()

    def _on_adopt(self, message: Adopt) -> None:
        submit = message.submit
        retention = submit.retention
        assert retention is not None
        names = choice_ids(submit.request_id, submit.choices)
        if retention.stream not in self._adopted:
            self._adopted[retention.stream] = self._open(retention, message.waited)
        adopted = self._adopted[retention.stream]
        if adopted is None:
            self._context.sessions.release(names)
            return
        adopted.answer.request_ids += names
        for number, name in zip(submit.choices, names, strict=True):
            adopted.known.add(retention.first + number)
            adopted.session.add([name], retention.first + number)

    def _open(self, retention: Retention, waited: float) -> _Adopted | None:
        """waited: seconds for which no client has come back."""
        context = self._context
        form, request = decode_format(retention.format), context.admission.adopted(retention.owner)
        if form is not None and not form.detached and waited >= retention.seconds:
            return None
        if form is None or request is None:
            why = "its key is no more" if form is not None else "another version has begun it"
            log.warning("%s is not adopted: %s", retention.stream, why)
            return None
        encoder, response = encoder_for(form, context.defaults.parsers)
        answer_retention = AnswerRetention(
            name=retention.stream,
            policy=RetentionPolicy(form.detached, retention.seconds),
            response=response,
            format=retention.format,
            partitions=form.partitions,
            tail=form.tail,
        )
        try:
            answer = context.answers.open(answer_retention, retention.owner, encoder)
        except ApiError as error:
            log.warning("%s is not adopted: %s", retention.stream, error.message)
            return None
        answer.stream.rewritten = True
        if not form.detached:
            answer.stream.deadline -= waited
        answer.accept()
        session = context.sessions.adopt(answer)
        settle = None
        if form.responses is not None and response is not None:
            given, previous = form.responses.given, form.responses.previous
            owner = request.client.name
            settle = self._memory.settle(owner, given, previous, response.formatter)
        release = context.admission.hold_adopted(request, form.choices)
        context.answers.run(answer, session, release, settle)
        metered = context.admission.metered_adopted(request, answer)
        return _Adopted(answer, session, form.choices, metered)

    def _on_end(self) -> None:
        """Begins to meter adopted answers when all requests are known; output that has come so far
        was metered by the previous gateway."""
        for name, adopted in self._adopted.items():
            if adopted is None:
                continue
            if adopted.known == set(range(adopted.choices)):
                adopted.session.measure(adopted.metered)
            else:
                log.warning("%s is not adopted: choices of it are lost", name)
                self._context.answers.streams.drop(name)
        count = sum(adopted is not None for adopted in self._adopted.values())
        if count:
            log.info("adopted %d answers of the gateway before", count)
        self._adopted.clear()
        self._context.answers.on_adopted()

"""Handlers of resumable streams and of responses by their ids, and what a
gateway takes over from the one before it.

- ResumableHandlers: only the key that asked for an answer finds it; without keys, whoever knows its
  id.
- Adopter: adopts answers, and adapters. The core says which requests it has adopted (Adopt), then
  delivers their text from the beginning. So an adopted answer is written as one that this gateway
  was asked for; only its head was sent already.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from aiohttp import web
from msgspec import json

from pipeinfer.gateway.errors import ApiError, Handler, json_response
from pipeinfer.gateway.ledger import AdoptionEnded
from pipeinfer.gateway.response_store import StoredResponse
from pipeinfer.gateway.responses_api import input_items
from pipeinfer.gateway.resumable_answers import (
    AnswerRetention,
    ResumableAnswer,
    decode_format,
    encoder_for,
    gone,
)
from pipeinfer.gateway.resumable_streams import (
    ResumableStream,
    RetentionPolicy,
    StreamGone,
    StreamUnknown,
    parse_event_id,
)
from pipeinfer.gateway.serving import HandlerContext
from pipeinfer.gateway.sessions import AdoptedSession, ResponseSink
from pipeinfer.gateway.siblings import is_forwarded
from pipeinfer.gateway.translation_handlers import ResponseMemory
from pipeinfer.messages import AdapterChanges, Adopt, Retention
from pipeinfer.params import JsonObject, choice_ids

log = logging.getLogger(__name__)

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
        """`handler`; what this gateway does not have is asked of the others of this host."""

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
            stored = json.decode((await self._stored(request)).response)
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
    """An answer that is being adopted. choices: that it has. known: those that have come.
    metered: the sink of what is new."""

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
            for state in message.states:
                self._context.defaults.adapters.adopt(state)
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
        """What has come so far is not metered: the gateway before has had it."""
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

"""What the handlers of HTTP requests need, put together by the driver.

Knows its parts by their kinds only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from aiohttp import web
from msgspec.structs import replace

from pipeinfer.gateway.auth import CLIENT_REQUEST, AccessLog, Admission, x_request_id
from pipeinfer.gateway.bodies import BodyDecoder, BodyReader
from pipeinfer.gateway.core import GatewayCore
from pipeinfer.gateway.cross_origin import BrowserGuard
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.events import Call, Delta, Failed, Started
from pipeinfer.gateway.ledger import RequestTraces, client_traceparent
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.monitor import PipelineMonitor
from pipeinfer.gateway.old_functions import NAMES as OLD_NAMES
from pipeinfer.gateway.old_functions import as_tools
from pipeinfer.gateway.outlets import Outlet
from pipeinfer.gateway.requests import Job, Terms, chat_prompt
from pipeinfer.gateway.schema import ChatRequest, DetokenizeRequest, Request, TokenizeRequest
from pipeinfer.gateway.sessions import RequestSessions, ResponseSink
from pipeinfer.gateway.shapes import Answer
from pipeinfer.gateway.streams import EventStream, WholeAnswer, WriteBatch, api_error
from pipeinfer.json_values import JsonObject
from pipeinfer.packing import pack, unpack
from pipeinfer.params import SamplingParams


@dataclass(frozen=True)
class Service:
    """What the handlers need. `context_length`: tokens of prompt and output, 0 if not known.
    `fingerprint`: of what makes the answers. `tokenizer_info`: JSON."""

    core: GatewayCore
    sessions: RequestSessions
    metrics: Metrics
    model: str
    terms: Terms
    admission: Admission
    browsers: BrowserGuard
    max_body_bytes: int = 32 * 2**20
    context_length: int = 0
    fingerprint: str = ""
    tokenizer_info: bytes = b"{}"
    monitor: PipelineMonitor | None = None  # None: there is no page
    access_log: AccessLog = field(default_factory=lambda: AccessLog(RequestTraces()))
    created: int = field(default_factory=lambda: int(time.time()))


# Fields that the body of /tokenize shares with a chat's: all that a chat's prompt depends on.
CHAT_FIELDS = frozenset(TokenizeRequest.__struct_fields__) & frozenset(
    ChatRequest.__struct_fields__
)
# Without an answer a prompt may be longer than the context.
NO_OUTPUT = SamplingParams(max_tokens=0, skip_special_tokens=False)


def tokenize_call(request: TokenizeRequest, name: str, terms: Terms) -> Call:
    """What asks for the ids. ApiError 400."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
    if request.prompt is None:
        chat = ChatRequest(**{field: getattr(request, field) for field in CHAT_FIELDS})
        return replace(
            prompt_call(chat, name, terms),
            return_prompt_ids=True,
            return_token_strs=bool(request.return_token_strs),
        )
    return Call(
        request_id=name,
        params=NO_OUTPUT,
        timeout=terms.timeout,
        text=request.prompt,
        add_special_tokens=request.add_special_tokens is not False,
        return_prompt_ids=True,
        return_token_strs=bool(request.return_token_strs),
        only_encode=True,
    )


def prompt_call(request: ChatRequest, name: str, terms: Terms) -> Call:
    """What asks for the prompt of a chat, also where nobody would read its answer's calls.
    ApiError 400."""
    with_tools = as_tools(request)
    try:
        prompt = chat_prompt(with_tools or request, terms.reading)
    except ApiError as error:
        raise (error if with_tools is None else renamed(error, OLD_NAMES)) from None
    return Call(
        request_id=name,
        params=NO_OUTPUT,
        timeout=terms.timeout,
        chat=prompt.chat,
        template_arguments=prompt.arguments,
        add_special_tokens=bool(request.add_special_tokens),
        only_encode=True,
    )


def detokenize_call(request: DetokenizeRequest, name: str, terms: Terms) -> Call:
    """What asks for the text."""
    return Call(
        request_id=name,
        params=replace(NO_OUTPUT, skip_special_tokens=bool(request.skip_special_tokens)),
        timeout=terms.timeout,
        prompt_ids=pack(request.tokens),
        return_prompt_text=True,
        only_encode=True,
    )


class EncodedPrompt:
    """A sink of the port that waits for what the tokenizer says of the one prompt."""

    def __init__(self) -> None:
        self._result: asyncio.Future[Started | Failed] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        if not self._result.done():
            self._result.set_result(started)

    def delta(self, index: int, delta: Delta) -> None:
        """Only says that this was all."""

    def failed(self, index: int, failed: Failed) -> None:
        if not self._result.done():
            self._result.set_result(failed)

    async def prompt(self) -> Started:
        """What was said. Raises ApiError for a refusal."""
        said = await self._result
        if isinstance(said, Failed):
            raise api_error(said)
        return said


def tokenize_response(started: Started, context_length: int) -> JsonObject:
    """The answer of /tokenize, as vLLM's."""
    ids = unpack(started.prompt_ids).tolist()
    return {
        "count": len(ids),
        "max_model_len": context_length,
        "tokens": ids,
        "token_strs": list(started.token_strs) or None,
    }


IGNORED_SCHEMA = web.RequestKey("left_out", str)  # of a request whose schema is not held in full
MOST_IGNORED_SCHEMA = 1_000  # letters
HEADER_LETTERS = " !#$&'()*+,/:;=?@[]{}|<>"  # that a header has as they are

log = logging.getLogger(__name__)


class Serving:
    """Of one server."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._bodies = BodyDecoder(
            BodyReader(service.max_body_bytes), service.metrics.count_unknown_fields
        )
        self._write_batch = WriteBatch()

    async def read_body(self, request: web.Request, kind: type[Request]) -> Request:
        """The checked body, read only if its request could be taken now."""
        self.check_capacity(1)
        body = await self._bodies.read(request, kind)
        self.check_model(body.model)
        return body

    def new_answer(self, name: str, job: Job, chat: bool) -> Answer:
        """What the answer called `name` says of itself."""
        return Answer(
            chat=chat,
            id=name,
            created=int(time.time()),
            model=self.service.model,
            shown=job.shown,
            reader=job.reader,
            calling=job.calling,
            fingerprint=self.service.fingerprint,
        )

    async def respond(self, request: web.Request, job: Job, outlet: Outlet) -> web.StreamResponse:
        """Runs the job; `outlet` makes the answer."""
        self.check_capacity(job.choices)
        asked = job.asked
        if asked.left_out:
            _note_ignored_schema(request, asked.left_out)
        sink = EventStream(outlet, self._write_batch) if job.stream else WholeAnswer(outlet)
        told = _GrammarRefusals(sink, request, asked.loses) if asked.otherwise is not None else sink
        admission = self.service.admission
        admission.count_choices(request, job.prompts, job.choices)
        # Whatever still runs is hung up at the end, also when the handler is cancelled because the
        # client is gone.
        calls = self._with_client(request, job.calls)
        try:
            async with self.service.sessions.open(calls, admission.metered(request, told)):
                return await sink.respond(request)
        except ApiError as error:
            # Nobody behind the gateway knows which field has asked for the form.
            names = {"structured_outputs": asked.field} if asked.field else {}
            raise renamed(error, names) from None

    async def encode_prompt(self, request: web.Request, call: Call) -> Started:
        """What the tokenizer says of a prompt that is only to be encoded."""
        sink = EncodedPrompt()
        admission = self.service.admission
        calls = self._with_client(request, [call])
        async with self.service.sessions.open(calls, admission.metered(request, sink)):
            return await sink.prompt()

    def _with_client(self, request: web.Request, calls: Iterable[Call]) -> Iterator[Call]:
        """The calls, each with its client, which is also noted for those that look."""
        sight, client = self.service.monitor, self.service.admission.client_hash(request)
        for call in calls:
            if sight is not None:
                sight.set_owner(call.request_id, request[CLIENT_REQUEST].client.name)
            yield replace(call, client=client)

    def check_model(self, model: str | None) -> None:
        """ApiError 404 for another model than the one that is served; an empty name is none."""
        if model and model != self.service.model:
            message = (
                f"the model {model[:200]!r} does not exist; this server has {self.service.model!r}"
            )
            raise ApiError(404, message, "model", "model_not_found")

    def check_capacity(self, requests: int) -> None:
        """ApiError where so many more requests would not be taken now."""
        refusal = self.service.core.refusal(requests=requests)
        if refusal is not None:
            self.service.metrics.count_ended("refused")
            raise api_error(refusal)


class _GrammarRefusals:
    """A sink in front of another, of a request that is served although its grammar is refused: says
    so before the answer's headers leave. `loses`: what the answer is not held to then."""

    __slots__ = ("_loses", "_request", "_sink")

    def __init__(self, sink: ResponseSink, request: web.Request, loses: str) -> None:
        self._sink = sink
        self._request = request
        self._loses = loses

    def started(self, index: int, started: Started) -> None:
        if started.refusal:
            _note_ignored_schema(self._request, (f"{self._loses}: {started.refusal}",))
        self._sink.started(index, started)

    def delta(self, index: int, delta: Delta) -> None:
        self._sink.delta(index, delta)

    def failed(self, index: int, failed: Failed) -> None:
        self._sink.failed(index, failed)


def _note_ignored_schema(request: web.Request, places: Sequence[str]) -> None:
    """Says in a header, and in the log, what the answer is not held to."""
    # Names of properties are the client's: no log has them, a header takes ASCII only.
    request[IGNORED_SCHEMA] = quote("; ".join(places), HEADER_LETTERS)[:MOST_IGNORED_SCHEMA]
    keywords = sorted({each.partition(" ")[0] for each in places})
    log.info("%s: its answer is not held to %s", x_request_id(request), ", ".join(keywords))


def client_trace(request: web.Request) -> str:
    """The client's W3C traceparent, or none."""
    return client_traceparent(request.headers)

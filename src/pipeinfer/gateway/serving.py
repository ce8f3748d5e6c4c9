"""The way of each request that the pipeline answers: body in, calls out, answer back.

All endpoints share it; /tokenize and /detokenize end at the tokenizer. Knows no endpoint and no
form of an answer.
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
from pipeinfer.gateway.decoding import BodyType
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.events import Call, Failed, OutputDelta, Started
from pipeinfer.gateway.ledger import RequestTraces, client_traceparent
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.monitor import PipelineMonitor
from pipeinfer.gateway.prompts import chat_prompt
from pipeinfer.gateway.requests import ParsedRequest, RequestDefaults
from pipeinfer.gateway.response_encoders import ResponseEncoder
from pipeinfer.gateway.response_json import ResponseMetadata
from pipeinfer.gateway.schema import ChatRequest, DetokenizeRequest, TokenizeRequest
from pipeinfer.gateway.sessions import RequestSessions, ResponseSink
from pipeinfer.gateway.streams import EventStream, FullResponse, WriteBatch, api_error
from pipeinfer.gateway.tools import LEGACY_FIELD_NAMES, functions_to_tools
from pipeinfer.params import JsonObject, SamplingParams
from pipeinfer.wire import pack, unpack


@dataclass(frozen=True)
class Service:
    """What handlers of HTTP requests share.

    core: live requests, and health. sessions: where calls go in and deltas come out.
    metrics, access_log, admission, browsers: see their classes.
    model: the served name. terms: defaults and parsers for requests.
    max_body_bytes: after decompression. context_length: most tokens of prompt and output, 0:
        unknown.
    fingerprint: `system_fingerprint` of answers. tokenizer_info: JSON of /tokenizer_info.
    monitor: None where there is no page. created: Unix seconds, shown by /v1/models.
    """

    core: GatewayCore
    sessions: RequestSessions
    metrics: Metrics
    model: str
    terms: RequestDefaults
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


def tokenize_call(request: TokenizeRequest, name: str, terms: RequestDefaults) -> Call:
    """The call that asks for a prompt's ids. Raises ApiError 400."""
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


def prompt_call(request: ChatRequest, name: str, terms: RequestDefaults) -> Call:
    """The call that asks for a chat's prompt, also if its tool calls could not be parsed. Raises
    ApiError 400.
    """
    with_tools = functions_to_tools(request)
    try:
        prompt = chat_prompt(with_tools or request, terms.parsers)
    except ApiError as error:
        raise (error if with_tools is None else renamed(error, LEGACY_FIELD_NAMES)) from None
    return Call(
        request_id=name,
        params=NO_OUTPUT,
        timeout=terms.timeout,
        chat=prompt.chat,
        template_arguments=prompt.arguments,
        add_special_tokens=bool(request.add_special_tokens),
        only_encode=True,
    )


def detokenize_call(request: DetokenizeRequest, name: str, terms: RequestDefaults) -> Call:
    """The call that asks for the text of ids."""
    return Call(
        request_id=name,
        params=replace(NO_OUTPUT, skip_special_tokens=bool(request.skip_special_tokens)),
        timeout=terms.timeout,
        prompt_ids=pack(request.tokens),
        return_prompt_text=True,
        only_encode=True,
    )


class EncodedPrompt:
    """A ResponseSink that waits for the tokenizer's answer about one prompt."""

    def __init__(self) -> None:
        self._result: asyncio.Future[Started | Failed] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        if not self._result.done():
            self._result.set_result(started)

    def delta(self, index: int, delta: OutputDelta) -> None:
        """The end; Started brought all of it."""

    def failed(self, index: int, failed: Failed) -> None:
        if not self._result.done():
            self._result.set_result(failed)

    async def prompt(self) -> Started:
        """The encoded prompt. Raises ApiError if it was refused."""
        result = await self._result
        if isinstance(result, Failed):
            raise api_error(result)
        return result


def tokenize_response(started: Started, context_length: int) -> JsonObject:
    """The JSON of /tokenize, as vLLM has it."""
    ids = unpack(started.prompt_ids).tolist()
    return {
        "count": len(ids),
        "max_model_len": context_length,
        "tokens": ids,
        "token_strs": list(started.token_strs) or None,
    }


IGNORED_SCHEMA = web.RequestKey("left_out", str)  # of a request whose schema is not held in full
MAX_IGNORED_SCHEMA = 1_000  # letters
HEADER_LETTERS = " !#$&'()*+,/:;=?@[]{}|<>"  # that a header has as they are

log = logging.getLogger(__name__)


class Serving:
    """Serves the requests of all endpoints of one gateway."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._bodies = BodyDecoder(
            BodyReader(service.max_body_bytes), service.metrics.count_unknown_fields
        )
        self._write_batch = WriteBatch()

    async def read_body(self, request: web.Request, kind: type[BodyType]) -> BodyType:
        """The decoded body; read only if a request would be taken now."""
        self.check_capacity(1)
        body = await self._bodies.read(request, kind)
        self.check_model(body.model)
        return body

    def new_answer(self, name: str, job: ParsedRequest, chat: bool) -> ResponseMetadata:
        """The answer called `name`: its id, time, model and parsers."""
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
        self, request: web.Request, job: ParsedRequest, encoder: ResponseEncoder
    ) -> web.StreamResponse:
        """Runs the job; `encoder` encodes the answer."""
        self.check_capacity(job.choices)
        constraint = job.constraint
        if constraint.unenforced:
            _note_ignored_schema(request, constraint.unenforced)
        sink = EventStream(encoder, self._write_batch) if job.stream else FullResponse(encoder)
        checked = (
            _GrammarRefusals(sink, request, constraint.fallback_omits)
            if constraint.fallback is not None
            else sink
        )
        admission = self.service.admission
        admission.count_choices(request, job.prompts, job.choices)
        # Whatever still runs is hung up at the end, also when the handler is cancelled because the
        # client is gone.
        calls = self._with_client(request, job.calls)
        try:
            async with self.service.sessions.open(calls, admission.metered(request, checked)):
                return await sink.respond(request)
        except ApiError as error:
            # Nobody behind the gateway knows which field has asked for the form.
            names = {"structured_outputs": constraint.field} if constraint.field else {}
            raise renamed(error, names) from None

    async def encode_prompt(self, request: web.Request, call: Call) -> Started:
        """The tokenizer's answer about a prompt from which nothing is generated."""
        sink = EncodedPrompt()
        admission = self.service.admission
        calls = self._with_client(request, [call])
        async with self.service.sessions.open(calls, admission.metered(request, sink)):
            return await sink.prompt()

    def _with_client(self, request: web.Request, calls: Iterable[Call]) -> Iterator[Call]:
        """The calls with their client's hash; the monitor learns whose they are."""
        monitor, client = self.service.monitor, self.service.admission.client_hash(request)
        for call in calls:
            if monitor is not None:
                monitor.set_owner(call.request_id, request[CLIENT_REQUEST].client.name)
            yield replace(call, client=client)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 if `model` is not the served one; an empty name passes."""
        if model and model != self.service.model:
            message = (
                f"the model {model[:200]!r} does not exist; this server has {self.service.model!r}"
            )
            raise ApiError(404, message, "model", "model_not_found")

    def check_capacity(self, requests: int) -> None:
        """Raises ApiError if so many more requests would be refused now."""
        refusal = self.service.core.refusal(requests=requests)
        if refusal is not None:
            self.service.metrics.count_ended("refused")
            raise api_error(refusal)


class _GrammarRefusals:
    """A sink in front of another, for a request that is served though its grammar is refused.

    Notes before the headers are sent what the answer is not constrained by: `loses`.
    """

    __slots__ = ("_loses", "_request", "_sink")

    def __init__(self, sink: ResponseSink, request: web.Request, loses: str) -> None:
        self._sink = sink
        self._request = request
        self._loses = loses

    def started(self, index: int, started: Started) -> None:
        if started.refusal:
            _note_ignored_schema(self._request, (f"{self._loses}: {started.refusal}",))
        self._sink.started(index, started)

    def delta(self, index: int, delta: OutputDelta) -> None:
        self._sink.delta(index, delta)

    def failed(self, index: int, failed: Failed) -> None:
        self._sink.failed(index, failed)


def _note_ignored_schema(request: web.Request, parts: Sequence[str]) -> None:
    """Puts into a header and the log what the answer is not constrained by."""
    # Names of properties are the client's: no log has them, a header takes ASCII only.
    request[IGNORED_SCHEMA] = quote("; ".join(parts), HEADER_LETTERS)[:MAX_IGNORED_SCHEMA]
    keywords = sorted({each.partition(" ")[0] for each in parts})
    log.info("%s: its answer is not held to %s", x_request_id(request), ", ".join(keywords))


def client_trace(request: web.Request) -> str:
    """The client's W3C traceparent; "" for none."""
    return client_traceparent(request.headers)

"""The way of each request that the pipeline answers: body in, calls out, answer back.

- BodyReader, BodyDecoder: read and decode a body, within bounds of size, time and memory. A large
  body is decompressed, scanned and decoded in parts, between which the event loop serves others.
- decode: from the bytes of a body to a checked request. Unsupported fields are refused by name,
  unknown ones reported, also within messages and tools. 5.0 counts as 5 where a body needs an
  integer.
- Serving: opens a session of the core for a request and sends its answer. All endpoints share it;
  /tokenize and /detokenize end at the tokenizer.

Knows no endpoint and no form of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError
from msgspec import inspect
from msgspec.structs import replace

from pipeinfer.checkpoint.pooling import LABELS, Pooling
from pipeinfer.gateway.auth import AccessLog, Admission, BrowserGuard, x_request_id
from pipeinfer.gateway.connections import CONTINUE
from pipeinfer.gateway.core import QUEUE_FULL, GatewayCore
from pipeinfer.gateway.errors import (
    ALTERNATIVES,
    FIELDS_OF_OTHER_ENDPOINTS,
    IGNORED_NESTED_FIELDS,
    ApiError,
    from_validation,
    is_neutral,
    renamed,
)
from pipeinfer.gateway.ledger import (
    Call,
    Failed,
    OutputDelta,
    RequestTraces,
    Started,
    client_traceparent,
)
from pipeinfer.gateway.metrics import Metrics
from pipeinfer.gateway.monitor import PipelineMonitor
from pipeinfer.gateway.peers import HostGateways, Peers
from pipeinfer.gateway.pooling import PairScorer, TextPairs, VectorSink
from pipeinfer.gateway.requests import (
    ParsedRequest,
    RequestDefaults,
    adapted_fingerprint,
    chat_prompt,
)
from pipeinfer.gateway.response_encoders import (
    EventStream,
    FullResponse,
    ResponseEncoder,
    Settle,
    WriteBatch,
    api_error,
)
from pipeinfer.gateway.response_json import ResponseMetadata
from pipeinfer.gateway.resumable_answers import (
    BACKGROUND_SECONDS,
    AnswerRetention,
    MessagesForm,
    ResponsesForm,
    ResumableAnswer,
    ResumableAnswers,
    retention_policy,
    stream_format,
)
from pipeinfer.gateway.retention import ResponseStore, RetentionPolicy
from pipeinfer.gateway.schema import (
    SLICE_BYTES,
    Body,
    ChatRequest,
    DetokenizeRequest,
    JsonLimitExceeded,
    PoolingBody,
    TokenizeRequest,
    prescan,
)
from pipeinfer.gateway.sessions import RequestSessions, ResponseSink
from pipeinfer.gateway.tools import LEGACY_FIELD_NAMES, functions_to_tools
from pipeinfer.messages import Retention
from pipeinfer.params import Adapter, JsonObject, JsonValue, RequestParams, choice_ids
from pipeinfer.wire import pack, unpack

READ_TIMEOUT = 30.0  # seconds without a byte after which a client is not waited for
BODY_TIMEOUT = 600.0  # seconds for a whole body: 32 MiB over a line of 0.5 Mbit/s
SMALL_BODY = 64 * 2**10  # bytes of a body that do not count against MAX_BUFFERED
# Bytes beyond SMALL_BODY of all bodies that are being read or decoded. A body and the structs that
# are made of it take about three times its size for a moment, so the process stays under 1 GiB.
MAX_BUFFERED = 256 * 2**20
# Bytes that are decompressed at a time: well under a millisecond.
DECOMPRESSED_AT_ONCE = 256 * 2**10
RETRY_AFTER = 1  # seconds


class BodyReader:
    """Reads bodies of at most `max_bytes` bytes each, after decompression.

    _buffered: bytes beyond SMALL_BODY of all bodies that are being read or decoded now; at most
        _max_buffered.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_buffered = max(MAX_BUFFERED, max_bytes)
        self._buffered = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncGenerator[bytearray]:
        """The whole body; it counts as buffered until the context ends.

        Raises ApiError: 400 if it is broken, 408 if it does not arrive, 413 if it is too large,
        415 for an unknown Content-Encoding, 417 for an unknown Expect, 503 if too much is buffered.
        """
        decoder = _decoder(request)
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        await _send_continue(request)
        body = bytearray()
        try:
            await self._fill(body, decoder, request)
            yield body
        finally:
            self._buffered -= max(0, len(body) - SMALL_BODY)

    async def _fill(
        self, body: bytearray, decoder: _IdentityDecoder | _ZlibDecoder, request: web.Request
    ) -> None:
        try:
            if request.content.is_eof():  # it came with its head, as most do
                await self._take(body, decoder, request.content.read_nowait())
            else:
                async with asyncio.timeout(BODY_TIMEOUT):
                    while data := await self._next(request):
                        await self._take(body, decoder, data)
            decoder.end()
        except zlib.error:
            raise _broken_body("it cannot be decompressed") from None
        except (RequestPayloadError, HttpProcessingError):
            raise _broken_body("it ends early, or its chunks are malformed") from None
        except TimeoutError:
            message = f"the whole body did not come within {BODY_TIMEOUT:g} s"
            raise ApiError(408, message, code="body_timeout") from None

    async def _take(
        self, body: bytearray, decoder: _IdentityDecoder | _ZlibDecoder, data: bytes
    ) -> None:
        for part in decoder.parts(data) if data else ():
            self._add(body, part)
            if len(part) == DECOMPRESSED_AT_ONCE:
                await asyncio.sleep(0)  # there is more to decompress; others first

    async def _next(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                return await request.content.readany()
        except TimeoutError:
            message = f"no byte of the body came for {READ_TIMEOUT:g} s"
            raise ApiError(408, message, code="body_timeout") from None

    def _add(self, body: bytearray, part: bytes) -> None:
        if len(body) + len(part) > self._max_bytes:
            raise self._too_large()
        before = max(0, len(body) - SMALL_BODY)
        body += part
        self._buffered += max(0, len(body) - SMALL_BODY) - before
        if self._buffered > self._max_buffered:
            message = "too many large bodies are being read"
            raise ApiError(503, message, code="overloaded", retry_after=RETRY_AFTER)

    def _too_large(self) -> ApiError:
        message = f"the body is too large: more than {self._max_bytes} bytes"
        return ApiError(413, message, code="body_too_large")


async def _send_continue(request: web.Request) -> None:
    """Asks for the body of a client that waits for 100 Continue."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        message = "the only Expect that is known is 100-continue"
        raise ApiError(417, message, code="unknown_expectation")
    await request.writer.write(CONTINUE)
    request.writer.output_size = 0  # the answer proper has not begun


def _broken_body(why: str) -> ApiError:
    return ApiError(400, f"the body is broken: {why}", code="invalid_body")


class _IdentityDecoder:
    """Passes a body on that is not compressed."""

    def parts(self, data: bytes) -> tuple[bytes]:
        return (data,)

    def end(self) -> None:
        """No end is marked, so every body is whole."""


class _ZlibDecoder:
    """Decompresses gzip or deflate, the latter with or without zlib's header."""

    def __init__(self, encoding: str) -> None:
        self._gzip = encoding != "deflate"
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS) if self._gzip else None

    def parts(self, data: bytes) -> Iterator[bytes]:
        """Decompresses `data`, and yields at most DECOMPRESSED_AT_ONCE bytes at a time. Raises
        zlib.error if it is broken."""
        if self._stream is None:
            bare = data[0] & 0x0F != 8
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS)
        full = False
        while data or full:
            if self._stream.eof and data:
                raise zlib.error("more after its end")
            part = self._stream.decompress(data, DECOMPRESSED_AT_ONCE)
            yield part
            full = len(part) == DECOMPRESSED_AT_ONCE
            data = self._stream.unconsumed_tail or self._stream.unused_data

    def end(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise zlib.error("it ends early")


def _decoder(request: web.Request) -> _IdentityDecoder | _ZlibDecoder:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return _IdentityDecoder()
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _ZlibDecoder(encoding)
    message = "the body's Content-Encoding is not supported; gzip and deflate are"
    raise ApiError(415, message, code="unsupported_encoding")


# Bytes of a body that is decoded at once: 5 ms in the worst case. Larger ones take turns by parts.
DECODED_AT_ONCE = SLICE_BYTES
_DONE = object()


class BodyDecoder:
    """Reads, scans and decodes bodies; all handlers share one.

    Bodies of up to DECODED_AT_ONCE bytes are decoded at once. Larger ones take turns, oldest waiter
    first: one part of one body in each iteration of the event loop.

    on_unknown_fields: called with names of fields that the schema does not have.
    """

    def __init__(
        self, bodies: BodyReader, on_unknown_fields: Callable[[Sequence[str]], object]
    ) -> None:
        self._bodies = bodies
        self._on_unknown_fields = on_unknown_fields
        self._lock = asyncio.Lock()  # the oldest waiter is next

    async def read(self, request: web.Request, kind: type[BodyType]) -> BodyType:
        """The decoded body. Raises ApiError 400 if the schema refuses it, and as
        BodyReader.read."""
        async with self._bodies.read(request) as body:
            if len(body) <= DECODED_AT_ONCE:
                raw = bytes(body)
                for _ in prescanned(raw, kind):
                    continue
                return decode(raw, kind, self._on_unknown_fields)
            # Parses one part of a body in each iteration of the event loop.
            parts, unfinished = prescanned(body, kind), True
            while unfinished:
                async with self._lock:
                    unfinished = next(parts, _DONE) is not _DONE
                    await asyncio.sleep(0)
            async with self._lock:
                decoded = decode(bytes(body), kind, self._on_unknown_fields)
                await asyncio.sleep(0)
                return decoded


# Objects of one body in which unknown fields are searched, a few ms at the worst. A client that
# sends more objects sends the same names with each.
MAX_OBJECTS = 2_000

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class KnownFields(NamedTuple):
    """The fields of the objects that may stand in one place.

    Attributes:
    - known: names of all fields
    - inner: by name of a field that holds objects or lists of objects, the fields of these
    """

    known: frozenset[str]
    inner: Mapping[str, KnownFields]


def unknown_within(body: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]) -> list[str]:
    """Dotted names of unknown fields within the body's fields ("messages.content.txt"), once for
    each occurrence. `body` is valid for `kind`; null counts as absent.
    """
    inner = fields_of(kind).inner
    pending = [(name, body[name], inner[name]) for name in inner if name in body]
    found: list[str] = []
    scanned = 0
    while pending and scanned < MAX_OBJECTS:
        where, raw, fields = pending.pop()
        first = bytes(memoryview(raw)[:1])
        if first == b"[":
            pending += [(where, item, fields) for item in reversed(_list(raw)[:MAX_OBJECTS])]
        elif first == b"{":
            scanned += 1
            for name, value in _object(raw).items():
                if name in fields.inner:
                    pending.append((f"{where}.{name}", value, fields.inner[name]))
                elif name not in fields.known and name not in IGNORED_NESTED_FIELDS:
                    found += [f"{where}.{name}"] if bytes(memoryview(value)[:5]) != b"null" else []
    return found


@cache
def fields_of(kind: type[msgspec.Struct]) -> KnownFields:
    """The fields of a body."""
    return _fields([kind])


def _fields(kinds: list[type[msgspec.Struct]]) -> KnownFields:
    known: set[str] = set()
    within: dict[str, list[type[msgspec.Struct]]] = {}
    for kind in kinds:
        for info in msgspec.structs.fields(kind):
            known.add(info.encode_name)
            structs = list(_structs(_type_of(info)))
            if structs:
                within.setdefault(info.encode_name, []).extend(structs)
    return KnownFields(
        frozenset(known), {name: _fields(structs) for name, structs in within.items()}
    )


def _type_of(field: msgspec.structs.FieldInfo) -> inspect.Type:
    """The type of a field, without its description."""
    kind = inspect.type_info(field.type)
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _structs(kind: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """The structs that a value of this type may be, or hold in a list."""
    if isinstance(kind, inspect.StructType):
        yield kind.cls
    elif isinstance(kind, inspect.ListType):
        yield from _structs(kind.item_type)
    elif isinstance(kind, inspect.UnionType):
        for item in kind.types:
            yield from _structs(item)


MAX_FIELD_BYTES = 32 * 2**10  # bytes of a field in which 5.0 becomes 5, some ms at the worst


def with_integral_floats_as_ints(
    body: Mapping[str, msgspec.Raw], kind: type[msgspec.Struct]
) -> bytes | None:
    """The body with 5.0 written as 5 where an integer is needed; None if there is no such number.
    Called for bodies that were refused. Raises msgspec.DecodeError.
    """
    types, changed = _integer_fields(kind), dict[str, JsonValue | msgspec.Raw](body)
    for name in types.keys() & body.keys():
        if memoryview(body[name]).nbytes <= MAX_FIELD_BYTES and b"." in bytes(body[name]):
            changed[name] = _as_integers(msgspec.json.decode(body[name]), types[name])
    found = any(changed[name] is not body[name] for name in body)
    return msgspec.json.encode(changed) if found else None


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[inspect.Type, ...]]:
    """Types of the fields that may hold an integer, at any depth, by name."""
    fields = {f.encode_name: _alternatives(_type_of(f)) for f in msgspec.structs.fields(kind)}
    return {name: types for name, types in fields.items() if any(map(_has_integer, types))}


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _has_integer(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.ListType):
        return any(map(_has_integer, _alternatives(kind.item_type)))
    if isinstance(kind, inspect.StructType):
        return bool(_integer_fields(kind.cls))
    return isinstance(kind, inspect.IntType)


def _as_integers(value: JsonValue, types: tuple[inspect.Type, ...]) -> JsonValue:
    if isinstance(value, float):
        takes_integers = any(isinstance(kind, inspect.IntType) for kind in types)
        return int(value) if takes_integers and value.is_integer() else value
    for kind in types:
        if isinstance(value, list) and isinstance(kind, inspect.ListType):
            return [_as_integers(item, _alternatives(kind.item_type)) for item in value]
        if isinstance(value, dict) and isinstance(kind, inspect.StructType):
            inner = _integer_fields(kind.cls)
            return {name: _as_integers(item, inner.get(name, ())) for name, item in value.items()}
    return value


BodyType = TypeVar("BodyType", bound=Body)


def prescanned(body: bytes | bytearray, kind: type[BodyType]) -> Iterator[None]:
    """Checks depth and size of a `body` of type `kind`, one slice an iteration; comes before
    decode(). Raises ApiError 400.
    """
    try:
        yield from prescan(body, kind.json_limits)
    except JsonLimitExceeded as error:
        raise ApiError(400, str(error), code="invalid_value") from None


def decode(
    body: bytes, kind: type[BodyType], on_unknown_fields: Callable[[Sequence[str]], object]
) -> BodyType:
    """The typed request in a pre-scanned `body`. ApiError 400 says which field is wrong and why.

    `on_unknown_fields`: called with the names of unknown fields, if any: of the body, then within
    its fields.
    """
    if not body.strip():
        raise ApiError(400, "the body is empty; it must be a JSON object", code="invalid_json")
    try:
        fields, known = _object(body), kind.__struct_fields__
        other_fields = {name: fields[name] for name in fields if name not in known}
        if other_fields:
            _check_unsupported(other_fields, kind, on_unknown_fields)
        decoded = _typed(body, fields, kind)
        if unknown := unknown_within(fields, kind):
            on_unknown_fields(unknown)
        return decoded
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def _typed(body: bytes, fields: Mapping[str, msgspec.Raw], kind: type[BodyType]) -> BodyType:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        with_ints = with_integral_floats_as_ints(fields, kind)
        if with_ints is None:
            raise
        return msgspec.json.decode(with_ints, type=kind)


def _check_unsupported(
    fields: Mapping[str, msgspec.Raw],
    kind: type[Body],
    on_unknown_fields: Callable[[Sequence[str]], object],
) -> None:
    refused, unknown = kind.unsupported_fields, list[str]()
    for name, value in fields.items():
        if name in kind.ignored_fields:
            continue
        if name not in refused:
            unknown.append(name)
        elif not is_neutral(value, refused[name]):
            scope = "endpoint" if name in FIELDS_OF_OTHER_ENDPOINTS else "server"
            message = f"{name} is not supported by this {scope}"
            instead = [
                alternative
                for alternative in ALTERNATIVES.get(name, ())
                if alternative in kind.__struct_fields__
            ]
            if instead:
                message += f"; ask for {instead[0]}"
            raise ApiError(400, message, name, "unsupported_parameter")
    if unknown:
        on_unknown_fields(unknown)


@dataclass(frozen=True)
class HandlerContext:
    """Objects and options that the HTTP handlers share.

    Attributes:
    - core: live requests, and health
    - sessions: where calls go in and deltas come out
    - metrics, access_log, admission, browsers, answers: see their classes
    - model: the served name
    - defaults: of requests, with limits and parsers
    - max_body_bytes: after decompression
    - context_length: most tokens of prompt and output, 0: unknown
    - fingerprint: `system_fingerprint` of answers
    - tokenizer_info: JSON of /tokenizer_info
    - monitor: None where there is no page
    - created: Unix seconds, shown by /v1/models
    - pooling: how vectors or scores are made; None: texts are generated
    - template_roles: the chat template takes the roles "query" and "document"
    - store: None without --store
    - peers: the other gateways
    - siblings: those that are asked for kept answers
    """

    core: GatewayCore
    sessions: RequestSessions
    metrics: Metrics
    model: str
    defaults: RequestDefaults
    admission: Admission
    browsers: BrowserGuard
    answers: ResumableAnswers
    peers: Peers
    siblings: HostGateways
    max_body_bytes: int = 32 * 2**20
    context_length: int = 0
    fingerprint: str = ""
    tokenizer_info: bytes = b"{}"
    monitor: PipelineMonitor | None = None
    access_log: AccessLog = field(default_factory=lambda: AccessLog(RequestTraces()))
    created: int = field(default_factory=lambda: int(time.time()))
    pooling: Pooling | None = None
    template_roles: bool = False
    store: ResponseStore | None = None


# Fields that /tokenize shares with chats: all that a chat's prompt depends on.
CHAT_FIELDS = frozenset(TokenizeRequest.__struct_fields__) & frozenset(
    ChatRequest.__struct_fields__
)
# Without an answer a prompt may be longer than the context.
NO_OUTPUT = RequestParams(max_tokens=0, skip_special_tokens=False)


def tokenize_call(request: TokenizeRequest, name: str, defaults: RequestDefaults) -> Call:
    """The call for a prompt's ids. Raises ApiError 400."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
    if request.prompt is None:
        chat = ChatRequest(**{field: getattr(request, field) for field in CHAT_FIELDS})
        return replace(
            chat_prompt_call(chat, name, defaults),
            return_prompt_ids=True,
            return_token_strs=bool(request.return_token_strs),
        )
    return Call(
        request_id=name,
        params=NO_OUTPUT,
        timeout=defaults.timeout,
        text=request.prompt,
        add_special_tokens=request.add_special_tokens is not False,
        return_prompt_ids=True,
        return_token_strs=bool(request.return_token_strs),
        only_encode=True,
    )


def chat_prompt_call(request: ChatRequest, name: str, defaults: RequestDefaults) -> Call:
    """The call for a chat's prompt, also where the model's tool calls cannot be parsed. Raises
    ApiError 400.
    """
    with_tools = functions_to_tools(request)
    try:
        prompt = chat_prompt(with_tools or request, defaults.parsers)
    except ApiError as error:
        raise (error if with_tools is None else renamed(error, LEGACY_FIELD_NAMES)) from None
    return Call(
        request_id=name,
        params=NO_OUTPUT,
        timeout=defaults.timeout,
        chat=prompt.chat,
        template_arguments=prompt.arguments,
        add_special_tokens=bool(request.add_special_tokens),
        only_encode=True,
    )


def detokenize_call(request: DetokenizeRequest, name: str, defaults: RequestDefaults) -> Call:
    """The call for the text of ids."""
    return Call(
        request_id=name,
        params=replace(NO_OUTPUT, skip_special_tokens=bool(request.skip_special_tokens)),
        timeout=defaults.timeout,
        prompt_ids=pack(request.tokens),
        return_prompt_text=True,
        only_encode=True,
    )


class EncodedPromptSink:
    """A ResponseSink that waits for the tokenizer's answer about one prompt."""

    def __init__(self) -> None:
        self._result: asyncio.Future[Started | Failed] = asyncio.get_running_loop().create_future()

    def started(self, index: int, started: Started) -> None:
        if not self._result.done():
            self._result.set_result(started)

    def delta(self, index: int, delta: OutputDelta) -> None:
        """The end of the request; Started has brought the prompt."""

    def failed(self, index: int, failed: Failed) -> None:
        if not self._result.done():
            self._result.set_result(failed)

    async def prompt(self) -> Started:
        """Encodes the prompt of a call. Raises ApiError if it was refused."""
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


# Schema keywords of this request that the grammar does not enforce.
IGNORED_SCHEMA = web.RequestKey("left_out", str)
MAX_IGNORED_SCHEMA = 1_000  # characters of these
MAX_LISTED = 20  # names of models in an error
HEADER_SAFE = " !#$&'()*+,/:;=?@[]{}|<>"  # characters that need no escape in a header

log = logging.getLogger(__name__)


class Serving:
    """Serves the requests of all endpoints of one gateway."""

    def __init__(self, context: HandlerContext) -> None:
        self.context = context
        self._bodies = BodyDecoder(
            BodyReader(context.max_body_bytes), context.metrics.count_unknown_fields
        )
        self._write_batch = WriteBatch()
        self._label_ids: tuple[int, ...] = ()

    async def read_body(self, request: web.Request, kind: type[BodyType]) -> BodyType:
        """Reads and decodes the body. Raises ApiError before it is read if no request would be
        taken now."""
        await self.refuse_beyond_capacity(1)
        body = await self._bodies.read(request, kind)
        self.check_model(body.model)
        return body

    def response_metadata(self, name: str, parsed: ParsedRequest, chat: bool) -> ResponseMetadata:
        """The parts that all chunks of the response with id `name` have in common."""
        return ResponseMetadata(
            chat=chat,
            id=name,
            created=int(time.time()),
            model=self.context.model if parsed.adapter is None else parsed.adapter.name,
            output_options=parsed.output_options,
            parser_factory=parsed.parser_factory,
            tool_call_options=parsed.tool_call_options,
            fingerprint=self._fingerprint(parsed.adapter),
        )

    def _fingerprint(self, adapter: Adapter | None) -> str:
        """The `system_fingerprint` of answers: another one for each content of an adapter."""
        base = self.context.fingerprint
        if adapter is None or not base:
            return base
        return adapted_fingerprint(base, adapter)

    async def respond(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        encoder: ResponseEncoder,
        retention: AnswerRetention | None = None,
        settle: Settle | None = None,
    ) -> web.StreamResponse:
        """Runs the calls of the request; `encoder` encodes the answer, by events if `retention`
        says so. retention: None if the request ends with its connection. settle(): awaited before
        the client gets the end of its answer."""
        if self.context.pooling is not None:
            made = "scores" if self.context.pooling.scores else "embeddings"
            message = f"this server makes {made}, and generates no texts"
            raise ApiError(501, message, code="not_implemented")
        await self.refuse_beyond_capacity(parsed.choices)
        constraint = parsed.constraint
        if constraint.unenforced:
            _note_ignored_schema(request, constraint.unenforced)
        await self.context.admission.count_choices(request, parsed.prompts, parsed.choices)
        try:
            if retention is not None:
                return await self._respond_resumable(request, parsed, encoder, retention, settle)
            sink = (
                EventStream(encoder, self._write_batch, settle)
                if parsed.stream
                else FullResponse(encoder, settle)
            )
            # Whatever still runs is hung up at the end, also when the handler is cancelled because
            # the client is gone.
            async with self._session(request, parsed, sink):
                return await sink.respond(request)
        except ApiError as error:
            # The stages behind the gateway do not know which field the constraint comes from.
            names = {"structured_outputs": constraint.field} if constraint.field else {}
            raise renamed(error, names) from None

    async def _respond_resumable(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        encoder: ResponseEncoder,
        retention: AnswerRetention,
        settle: Settle | None,
    ) -> web.StreamResponse:
        admission, answers = self.context.admission, self.context.answers
        answer = answers.open(retention, admission.owner(request), encoder)
        calls = self._retained_calls(request, parsed.calls, retention, answer)
        session = self._session(request, replace(parsed, calls=calls), answer)
        release = admission.hold_choices(request)
        return await answers.respond(request, retention, answer, session, release, settle)

    def _retained_calls(
        self,
        request: web.Request,
        calls: Iterable[Call],
        retention: AnswerRetention,
        answer: ResumableAnswer,
    ) -> Iterator[Call]:
        """Calls of a resumable answer. They outlive this gateway if another one could write it."""
        owner, first = self.context.admission.owner(request), 0
        for call in calls:
            message = None
            if retention.format:
                answer.request_ids += choice_ids(call.request_id, range(call.params.n))
                message = Retention(
                    stream=retention.name,
                    owner=owner,
                    seconds=retention.policy.seconds,
                    first=first,
                    format=retention.format,
                )
            yield replace(call, retention=message)
            first += call.params.n

    def _session(
        self, request: web.Request, parsed: ParsedRequest, sink: ResponseSink
    ) -> AbstractAsyncContextManager[None]:
        """The session of the request's calls, whose events `sink` gets."""
        constraint, admission = parsed.constraint, self.context.admission
        if constraint.fallback is not None:
            sink = _GrammarRefusals(sink, request, constraint.fallback_omits)
        calls = self._with_client(request, parsed.calls)
        return self.context.sessions.open(calls, admission.metered(request, sink))

    def retention(
        self,
        request: web.Request,
        parsed: ParsedRequest,
        metadata: ResponseMetadata,
        *,
        responses: ResponsesForm | None = None,
        messages: MessagesForm | None = None,
    ) -> AnswerRetention | None:
        """How the answer is retained; None if it ends with its connection. responses, messages: of
        these APIs. Raises ApiError 400."""
        background = responses is not None and responses.background
        policy = (
            RetentionPolicy(True, BACKGROUND_SECONDS)
            if background
            else retention_policy(request, parsed.stream, self.context.answers.reattach)
        )
        if policy is None:
            return None
        form = stream_format(parsed, metadata, policy, responses, messages)
        return AnswerRetention(
            name=metadata.id,
            policy=policy,
            format=form.encoded(),
            partitions=form.partitions,
            tail=form.tail,
            answers_at_once=background and not parsed.stream,
        )

    def owner(self, request: web.Request) -> str:
        """Name of the key that sent the request."""
        return self.context.admission.principal(request).name

    async def encode_prompt(self, request: web.Request, call: Call) -> Started:
        """The tokenizer's answer about a prompt from which nothing is generated."""
        sink = EncodedPromptSink()
        admission = self.context.admission
        calls = self._with_client(request, [call])
        async with self.context.sessions.open(calls, admission.metered(request, sink)):
            return await sink.prompt()

    async def vectors(
        self, request: web.Request, calls: Iterable[Call], count: int
    ) -> tuple[list[bytes], int]:
        """The vectors of `count` calls for one each, and tokens of all their prompts."""
        await self.refuse_beyond_capacity(count)
        sink = VectorSink(count)
        admission = self.context.admission
        await admission.count_choices(request, count, count)
        with_client = self._with_client(request, calls)
        async with self.context.sessions.open(with_client, admission.metered(request, sink)):
            return await sink.vectors()

    async def scores(
        self, request: web.Request, body: PoolingBody, pairs: TextPairs, request_id: str
    ) -> tuple[list[float], int]:
        """The score of each pair, and tokens of all prompts."""
        context = self.context
        assert context.pooling is not None
        label_ids = await self._ids_of_labels(request) if context.pooling.scores else ()
        scorer = PairScorer(context.pooling, label_ids, context.template_roles)
        scorer.check(pairs, context.defaults.max_prompts, context.max_body_bytes)
        calls = scorer.calls(pairs, request_id, body, context.defaults, client_trace(request))
        try:
            vectors, tokens = await self.vectors(request, calls, scorer.num_calls(pairs))
        except ApiError as error:
            raise renamed(error, {"prompt": pairs.field, "messages": pairs.field}) from None
        return scorer.scores(pairs, vectors), tokens

    async def _ids_of_labels(self, request: web.Request) -> tuple[int, ...]:
        """Token ids of the two labels (yes and no) of a model that scores, asked of the tokenizer
        once. The tokenizer refuses to start if a label is not one token."""
        if not self._label_ids:
            self._label_ids = tuple([await self._label_id(request, label) for label in LABELS])
        return self._label_ids

    async def _label_id(self, request: web.Request, label: str) -> int:
        asked = TokenizeRequest(prompt=label, add_special_tokens=False)
        call = tokenize_call(asked, f"tok-{uuid.uuid4().hex}", self.context.defaults)
        return int(unpack((await self.encode_prompt(request, call)).prompt_ids)[0])

    def _with_client(self, request: web.Request, calls: Iterable[Call]) -> Iterator[Call]:
        """The calls with their client's hash; the monitor notes their owner."""
        monitor, client = self.context.monitor, self.context.admission.client_hash(request)
        for call in calls:
            if monitor is not None:
                monitor.set_owner(call.request_id, client)
            yield replace(call, client=client)

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 if `model` is neither the served one nor an adapter; an empty name
        passes."""
        adapters = self.context.defaults.adapters
        if model and model != self.context.model and adapters.get(model) is None:
            served = ", ".join(map(repr, [self.context.model, *adapters.names][:MAX_LISTED]))
            message = f"the model {model[:200]!r} does not exist; this server has {served}"
            raise ApiError(404, message, "model", "model_not_found")

    async def refuse_beyond_capacity(self, requests: int) -> None:
        """Raises ApiError, and counts a refused request, if so many more would be refused now."""
        core = self.context.core
        refusal = core.refusal(requests=requests)
        if refusal is not None and refusal.code == QUEUE_FULL:
            await self.context.peers.borrow("", "requests", requests)
            refusal = core.refusal(requests=requests)
        if refusal is not None:
            self.context.metrics.count_ended("refused")
            raise api_error(refusal)


class _GrammarRefusals:
    """A sink in front of another, for a request that is served though its grammar may be refused.

    If so, notes before the headers are sent what the answer is not constrained by.
    fallback_omits: as in OutputConstraint.
    """

    __slots__ = ("_fallback_omits", "_request", "_sink")

    def __init__(self, sink: ResponseSink, request: web.Request, fallback_omits: str) -> None:
        self._sink = sink
        self._request = request
        self._fallback_omits = fallback_omits

    def started(self, index: int, started: Started) -> None:
        if started.refusal:
            _note_ignored_schema(self._request, (f"{self._fallback_omits}: {started.refusal}",))
        self._sink.started(index, started)

    def delta(self, index: int, delta: OutputDelta) -> None:
        self._sink.delta(index, delta)

    def failed(self, index: int, failed: Failed) -> None:
        self._sink.failed(index, failed)


def _note_ignored_schema(request: web.Request, parts: Sequence[str]) -> None:
    """Puts into a header and the log what the answer is not constrained by."""
    # Names of properties are the client's: the log gets keywords alone, and a header takes ASCII.
    request[IGNORED_SCHEMA] = quote("; ".join(parts), HEADER_SAFE)[:MAX_IGNORED_SCHEMA]
    keywords = sorted({each.partition(" ")[0] for each in parts})
    log.info("%s: its answer is not constrained by %s", x_request_id(request), ", ".join(keywords))


def client_trace(request: web.Request) -> str:
    """The client's W3C traceparent; "" for none."""
    return client_traceparent(request.headers)

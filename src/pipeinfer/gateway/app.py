"""The HTTP application: routes, middlewares, and the handlers of all endpoints.

- build_app: OpenAI's endpoints, health, metrics and the like, with errors in OpenAI's form.
- Page, MonitorHandlers: the web page at /, and the endpoints of /monitor from which it reads.

Knows the schema, the sessions and the health table; not the pipeline behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast, get_args

import msgspec
from aiohttp import ETag, web
from aiohttp.typedefs import Middleware

from pipeinfer.checkpoint.pooling import Pooling
from pipeinfer.control import Prefix, RequestSpan
from pipeinfer.core import RecentTable
from pipeinfer.gateway import anthropic, openapi
from pipeinfer.gateway.auth import REQUEST_ID, Principal, x_request_id
from pipeinfer.gateway.errors import (
    ApiError,
    Handler,
    error_response,
    http_error,
    json_response,
    renamed,
)
from pipeinfer.gateway.lora import LoraHandlers
from pipeinfer.gateway.monitor import (
    CachedPrefix,
    CachedPrefixes,
    GroupPrefixes,
    PipelineMonitor,
    PipelineRates,
    PipelineSnapshot,
    RequestSpans,
    SpanEvent,
    StageSpan,
)
from pipeinfer.gateway.pooling import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    embedding_calls,
    embedding_response,
    pairs_to_rerank,
    pairs_to_score,
    rerank_response,
    score_response,
    vector_options,
)
from pipeinfer.gateway.requests import ParsedRequest, parse_chat, parse_completion
from pipeinfer.gateway.response_encoders import (
    EVENT_STREAM_HEADERS,
    BestOf,
    FullResponseEncoder,
    ResponseEncoder,
    StreamEncoder,
)
from pipeinfer.gateway.response_handlers import ResumableHandlers, TranslationHandlers
from pipeinfer.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pipeinfer.gateway.serving import (
    IGNORED_SCHEMA,
    EncodedPromptSink,
    HandlerContext,
    Serving,
    client_trace,
    detokenize_call,
    tokenize_call,
    tokenize_response,
)
from pipeinfer.gateway.sessions import CANNOT_SLEEP, RESET_TIMEOUT, SLEEP_TAGS
from pipeinfer.messages import SetSleep, SleepMode
from pipeinfer.params import Adapter, JsonObject, JsonValue
from pipeinfer.version import __version__
from pipeinfer.wire import unpack

log = logging.getLogger(__name__)


def build_app(context: HandlerContext) -> web.Application:
    """The application. Its runner must be made with handler_cancellation=True, and its connections
    with auto_decompress=False: bodies are decompressed here, within their bound."""
    handlers = _Handlers(context)
    app = web.Application(
        middlewares=[
            context.access_log.middleware(),
            handlers.errors,
            context.browsers.cors.middleware(),
            context.browsers.middleware(),
            context.admission.middleware(),
        ],
    )
    app.on_response_prepare.append(_add_headers)
    app.on_response_prepare.append(context.browsers.cors.add_cors_headers)
    app.on_response_prepare.append(context.admission.add_limit_headers)
    handlers.route(app.router)
    return app


def _query(request: web.Request, name: str, choices: Sequence[str]) -> str:
    """The query's parameter, the first choice without one. Raises ApiError 400 for others."""
    value = request.query.get(name, choices[0])
    if value not in choices:
        raise ApiError(400, f"{name} must be one of {', '.join(choices)}", param=name)
    return value


async def _continue_later(request: web.Request) -> None:
    """100 Continue is sent when the body is read, behind key and limits."""


class _Handlers:
    def __init__(self, context: HandlerContext) -> None:
        self._context = context
        self._serving = Serving(context)
        self._translated = TranslationHandlers(self._serving)
        self._lora = LoraHandlers(self._serving)
        self._resumable = ResumableHandlers(context)

    def route(self, router: web.UrlDispatcher) -> None:
        """Registers all routes."""
        router.add_get("/health", self.health)
        router.add_get("/health/live", self.live)
        router.add_get("/health/ready", self.ready)
        router.add_get("/metrics", self.metrics)
        router.add_get("/version", self.version)
        router.add_get("/openapi.json", self.openapi)
        router.add_get("/docs", self.docs)
        router.add_get("/ping", self.live)  # SageMaker's path for health checks
        router.add_post("/ping", self.live)
        for path in (str, slash_tolerant):
            router.add_get(path("/v1/models"), self.list_models)
            router.add_get(path("/v1/models/") + "{model:.+}", self.retrieve_model)
            for name, handler in (
                ("/v1/chat/completions", self.chat),
                ("/v1/completions", self.completions),
                ("/v1/embeddings", self.embeddings),
                ("/v1/rerank", self.rerank),
                ("/v1/score", self.score),
                *self._translated.routes().items(),
            ):
                router.add_post(path(name), handler, expect_handler=_continue_later)
            self._resumable.route(router, path)
        router.add_post("/tokenize", self.tokenize, expect_handler=_continue_later)
        router.add_post("/detokenize", self.detokenize, expect_handler=_continue_later)
        for path, handler in (("/score", self.score), ("/rerank", self.rerank)):
            router.add_post(path, handler, expect_handler=_continue_later)
        for path, handler in (
            ("/v1/load_lora_adapter", self._lora.load),
            ("/v1/unload_lora_adapter", self._lora.unload),
        ):
            router.add_post(path, handler, expect_handler=_continue_later)
        router.add_get("/tokenizer_info", self.tokenizer_info)
        router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        router.add_post("/sleep", self.sleep)
        router.add_post("/wake_up", self.wake_up)
        router.add_get("/is_sleeping", self.is_sleeping)
        page = Page()
        page.route_docs(router)
        if self._context.monitor is not None:
            page.route(router)
            MonitorHandlers(self._context, self._context.monitor).route(router)

    # --------------------------------------------------------------------------------- middlewares

    @property
    def errors(self) -> Middleware:
        @web.middleware
        async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except ApiError as error:
                return adapted_error_response(request, error)
            except web.HTTPException as error:
                response = adapted_error_response(request, http_error(request, error))
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
                return response
            except Exception:
                log.exception("%s %s failed", request.method, request.path)
                return adapted_error_response(request, ApiError(500, "internal error"))

        return errors

    # ------------------------------------------------------------------------------------- answers

    async def chat(self, request: web.Request) -> web.StreamResponse:
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        body = await self._serving.read_body(request, ChatRequest)
        parsed = parse_chat(body, request_id, self._context.defaults, client_trace(request))
        del body  # is not kept for the minutes that an answer may take
        return await self._generate(request, request_id, parsed, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        request_id = f"cmpl-{uuid.uuid4().hex}"
        body = await self._serving.read_body(request, CompletionRequest)
        parsed = parse_completion(body, request_id, self._context.defaults, client_trace(request))
        del body
        return await self._generate(request, request_id, parsed, chat=False)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read_body(request, TokenizeRequest)
        call = tokenize_call(body, f"tok-{uuid.uuid4().hex}", self._context.defaults)
        prompt = await self._serving.encode_prompt(request, call)
        return json_response(tokenize_response(prompt, self._context.context_length))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read_body(request, DetokenizeRequest)
        call = detokenize_call(body, f"tok-{uuid.uuid4().hex}", self._context.defaults)
        try:
            prompt = await self._serving.encode_prompt(request, call)
        except ApiError as error:
            raise renamed(error, {"prompt": "tokens"}) from None
        return json_response({"prompt": prompt.prompt_text})

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """Answers /tokenizer_info in vLLM's form."""
        return web.Response(body=self._context.tokenizer_info, content_type="application/json")

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        """Answers /reset_prefix_cache in vLLM's form; the body is not read."""
        await self._serving.refuse_beyond_capacity(0)
        stages = self._context.core.health.stages.values()
        missing = await self._context.sessions.reset_caches(stages)
        if missing:
            message = f"groups {sorted(missing)} have not answered within {RESET_TIMEOUT:g} s"
            raise ApiError(503, message, code="reset_unanswered", retry_after=1)
        return web.Response()

    async def sleep(self, request: web.Request) -> web.StreamResponse:
        """Answers /sleep in vLLM's form; the body is not read."""
        core = self._context.core
        row = core.health.cannot_sleep()
        if row is not None and "can_sleep" not in row.stats:
            message = f"{row.stage} is {row.state}"
            raise ApiError(503, message, code="starting", retry_after=1)
        if row is not None:
            raise ApiError(501, CANNOT_SLEEP.format(row.stage), code="cannot_sleep")
        level = _query(request, "level", ("1", "2"))
        mode = cast(SleepMode, _query(request, "mode", get_args(SleepMode)))
        refuses = _query(request, "wait", ("true", "false")) == "false"
        return await self._set_sleep(request, SetSleep(int(level), mode, refuses))

    async def wake_up(self, request: web.Request) -> web.StreamResponse:
        """Answers /wake_up in vLLM's form; weights and pages wake together."""
        tags = set(request.query.getall("tags", SLEEP_TAGS))
        if tags != set(SLEEP_TAGS):
            message = f"weights and pages come together: tags must be {' and '.join(SLEEP_TAGS)}"
            raise ApiError(400, message, param="tags")
        return await self._set_sleep(request, SetSleep(0))

    async def _set_sleep(self, request: web.Request, asked: SetSleep) -> web.StreamResponse:
        core = self._context.core
        if not self._context.admission.may_operate(request):
            raise ApiError(403, "an operator's key is needed", code="operators_only")
        if core.status in ("starting", "draining"):
            raise ApiError(503, f"the server is {core.status}", code=core.status, retry_after=1)
        await self._context.sessions.set_sleep(asked, core.health)
        return web.Response()

    async def is_sleeping(self, request: web.Request) -> web.StreamResponse:
        """Answers /is_sleeping in vLLM's form: true if some group sleeps."""
        rows = self._context.core.health.stages.values()
        sleeps = any(row.stats.get("sleep_level") for row in rows if row.name == "scheduler")
        return json_response({"is_sleeping": sleeps})

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        context = self._context
        pooling = self._pooling(scores=False)
        request_id = f"embd-{uuid.uuid4().hex}"
        body = await self._serving.read_body(request, EmbeddingRequest)
        options = vector_options(body, pooling)
        trace = client_trace(request)
        calls = embedding_calls(body, request_id, options, pooling, context.defaults, trace)
        del body
        try:
            vectors, tokens = await self._serving.vectors(request, calls, len(calls))
        except ApiError as error:
            raise renamed(error, {"prompt": "input", "max_tokens": "input"}) from None
        answer = await embedding_response(vectors, tokens, options, context.model)
        return web.Response(body=answer, content_type="application/json")

    async def score(self, request: web.Request) -> web.StreamResponse:
        self._pooling(scores=True)
        body = await self._serving.read_body(request, ScoreRequest)
        pairs = pairs_to_score(body, self._context.defaults.max_prompts)
        request_id = f"score-{uuid.uuid4().hex}"
        scores, tokens = await self._serving.scores(request, body, pairs, request_id)
        model = self._context.model
        return json_response(score_response(request_id, int(time.time()), model, scores, tokens))

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        self._pooling(scores=True)
        body = await self._serving.read_body(request, RerankRequest)
        pairs = pairs_to_rerank(body, self._context.defaults.max_prompts)
        request_id = f"rerank-{uuid.uuid4().hex}"
        scores, tokens = await self._serving.scores(request, body, pairs, request_id)
        model = self._context.model
        return json_response(rerank_response(request_id, model, body, pairs, scores, tokens))

    def _pooling(self, scores: bool) -> Pooling:
        """How the model makes vectors. scores: whether a model that makes scores alone will do.
        Raises ApiError 501."""
        pooling = self._context.pooling
        if pooling is None:
            made = "scores" if scores else "embeddings"
            task = "--task embed or --task score" if scores else "--task embed"
            message = f"this server generates texts; started with {task} it makes {made}"
            raise ApiError(501, message, code="not_implemented")
        if pooling.scores and not scores:
            raise ApiError(501, "this server makes scores alone", code="not_implemented")
        return pooling

    async def _generate(
        self, request: web.Request, request_id: str, parsed: ParsedRequest, chat: bool
    ) -> web.StreamResponse:
        metadata = self._serving.response_metadata(request_id, parsed, chat)
        encoder: ResponseEncoder = (
            StreamEncoder(metadata, parsed.choices, parsed.include_usage, parsed.continuous_usage)
            if parsed.stream
            else FullResponseEncoder(metadata, parsed.choices, _best_of(parsed))
        )
        retention = self._serving.retention(request, parsed, metadata)
        return await self._serving.respond(request, parsed, encoder, retention)

    # -------------------------------------------------------------------------------------- models

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        self._check_ready()
        adapters = self._context.defaults.adapters
        cards = [self._adapter_card(adapter) for adapter in adapters]
        return json_response({"object": "list", "data": [self._model_card(), *cards]})

    async def retrieve_model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        self._serving.check_model(name)
        self._check_ready()
        adapter = self._context.defaults.adapters.get(name)
        return json_response(self._model_card() if adapter is None else self._adapter_card(adapter))

    def _check_ready(self) -> None:
        core = self._context.core
        if not core.can_serve() and core.status != "asleep":
            reason = core.health.reason()
            message = f"the server is {core.status}" + (f": {reason}" if reason else "")
            raise ApiError(503, message, code=core.status, retry_after=1)

    def _model_card(self) -> JsonObject:
        context = self._context
        model: JsonObject = {
            "id": context.model,
            "object": "model",
            "created": context.created,
            "owned_by": "pipeinfer",
            "root": context.model,
            "parent": None,
        }
        if context.context_length:
            model["max_model_len"] = context.context_length
        return model

    def _adapter_card(self, adapter: Adapter) -> JsonObject:
        """An adapter's model card in vLLM's form: the adapter's folder is its root, the model its
        parent."""
        card = self._model_card()
        return card | {"id": adapter.name, "root": adapter.path, "parent": self._context.model}

    # -------------------------------------------------------------------------------------- health

    async def live(self, request: web.Request) -> web.StreamResponse:
        return json_response({"status": "live"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        core = self._context.core
        status = 200 if core.can_serve() else 503
        return json_response({"status": core.status, "reason": core.health.reason()}, status)

    async def health(self, request: web.Request) -> web.StreamResponse:
        core = self._context.core
        stages: list[JsonValue] = [
            {
                "stage": row.stage,
                "name": row.name,
                "group": row.group,
                "rank": row.rank,
                "state": row.state,
                "pid": row.pid,
                "reason": row.reason,
                **_kv_cache_dtype(row.stats),
            }
            for row in core.health.stages.values()
        ]
        status = 200 if core.status in ("ready", "degraded", "asleep") else 503
        return json_response({"status": core.status, "stages": stages}, status)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        accepted = request.headers.get("Accept", "")
        metrics = self._context.metrics
        metrics.gateways.others = await self._context.peers.counted()
        exposition, kind = metrics.exposition(accepted)
        return web.Response(body=exposition, headers={"Content-Type": kind})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=await asyncio.to_thread(_openapi_json), content_type="application/json"
        )

    async def docs(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            text=await asyncio.to_thread(_docs_html), content_type="text/html", headers=PAGE_HEADERS
        )

    async def version(self, request: web.Request) -> web.StreamResponse:
        return json_response({"version": __version__})


@cache
def _openapi_json() -> bytes:
    """The OpenAPI document, made on first use."""
    return msgspec.json.encode(openapi.document())


@cache
def _docs_html() -> str:
    return openapi.page(openapi.document())


def slash_tolerant(path: str) -> str:
    """A route for `path` with any number of slashes in the place of each: clients put a base with
    one at its end before paths with one at their beginning. No other path matches."""
    first, *segments = path.removeprefix("/").split("/")
    tail = "".join(f"{{_{n}:/+}}{segment}" for n, segment in enumerate(segments))
    return f"/{{_:/*}}{first}{tail}"


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    name = x_request_id(request)
    response.headers[REQUEST_ID] = name
    if MESSAGES_PATHS.fullmatch(request.path):
        response.headers["request-id"] = name  # as Anthropic's clients know it
    if IGNORED_SCHEMA in request:
        response.headers["x-schema-left-out"] = request[IGNORED_SCHEMA]
    response.headers.pop("Server", None)  # which software answers is not disclosed


def _kv_cache_dtype(stats: Mapping[str, float]) -> JsonObject:
    """The dtype of an engine's KV pages as `--kv-cache-dtype` has it; {} for other stages."""
    if "kv_fp8" not in stats:
        return {}
    return {"kv_cache_dtype": "fp8_e4m3" if stats["kv_fp8"] else "auto"}


def _best_of(parsed: ParsedRequest) -> BestOf | None:
    """Chooses the choices that are sent, if not all are; else None."""
    if not parsed.best_of:
        return None
    with_logprobs = parsed.output_options.logprobs is not None
    return BestOf(parsed.choices, parsed.choices // parsed.prompts, parsed.best_of, with_logprobs)


# /v1/messages and all paths below, unknown ones included. Routes take several slashes for one.
MESSAGES_PATHS = re.compile("/+v1/+messages(/.*)?", re.DOTALL)


def adapted_error_response(request: web.Request, error: ApiError) -> web.Response:
    """The response of `error`, in the form of the API that the request's path belongs to."""
    response = error_response(error)
    if MESSAGES_PATHS.fullmatch(request.path):
        body = anthropic.error_object(error, x_request_id(request))
        response.body = msgspec.json.encode(body)
        response.set_status(anthropic.status_of(error))
    return response


PAGE_FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".txt": "text/plain",
}
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # names are the same in the next version: browsers must ask
}
VENDOR_FOLDER = "vendor"  # libraries by others; tools/page builds them
# The name of each has a hash of its content, so a browser need not ask for it again.
VENDOR_HEADERS = PAGE_HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}


@dataclass(frozen=True)
class PageFile:
    """A file of the page. etag: digest of its content, without quotes."""

    body: bytes
    content_type: str
    etag: str
    headers: dict[str, str]


class Page:
    """Handlers of the page and its files. They need no key: nothing in them is secret."""

    def __init__(self) -> None:
        self._files = _page_files(PAGE_FOLDER, PAGE_HEADERS)
        vendored = _page_files(PAGE_FOLDER / VENDOR_FOLDER, VENDOR_HEADERS)
        self._files |= {f"{VENDOR_FOLDER}/{name}": file for name, file in vendored.items()}

    def route(self, router: web.UrlDispatcher) -> None:
        """Registers the handlers."""
        router.add_get("/", self.index)
        router.add_get("/{_:/+}", self.redirect_slashes)
        router.add_get("/page/{name:(vendor/)?[^/]+}", self.file)

    def route_docs(self, router: web.UrlDispatcher) -> None:
        """Registers the files of /docs, which is served also without the page."""
        names = "|".join(map(re.escape, openapi.FILES))
        router.add_get(f"/docs/{{name:{names}}}", self.file)

    async def index(self, request: web.Request) -> web.StreamResponse:
        return self._answer(request, INDEX)

    async def redirect_slashes(self, request: web.Request) -> web.StreamResponse:
        """Several slashes are the page, too; but the page finds its files relative to one slash."""
        return web.Response(status=308, headers={"Location": "/"})

    async def file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound()
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        file = self._files[name]
        known = request.if_none_match or ()
        if any(tag.value in (file.etag, "*") for tag in known):
            response = web.Response(status=304, headers=file.headers)
        else:
            charset = None if file.content_type.startswith("font/") else "utf-8"
            response = web.Response(
                body=file.body,
                content_type=file.content_type,
                charset=charset,
                headers=file.headers,
            )
        response.etag = ETag(value=file.etag)
        return response


def _page_files(folder: Path, headers: dict[str, str]) -> dict[str, PageFile]:
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in CONTENT_TYPES]
    return {path.name: _read_page_file(path, headers) for path in paths}


def _read_page_file(path: Path, headers: dict[str, str]) -> PageFile:
    body = path.read_bytes()
    return PageFile(
        body, CONTENT_TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32], headers
    )


EVENT_INTERVAL = 0.25  # seconds between two events of a feed
MAX_FEEDS = 64  # feeds of a gateway
MAX_PREFIXES = 16  # prefixes of each group
MAX_PREFIX_LETTERS = 240  # characters of a prefix's text
TEXT_LIFETIME = 600.0  # seconds for which a prefix's text is kept
MAX_TEXTS = 256  # texts of prefixes that are kept
_encode = msgspec.json.Encoder().encode


class MonitorHandlers:
    """Handlers of /monitor of one gateway."""

    def __init__(self, context: HandlerContext, monitor: PipelineMonitor) -> None:
        self._context = context
        self._monitor = monitor
        self._rates = PipelineRates(context.core.health)
        self._snapshot: PipelineSnapshot | None = None
        self._snapshot_at = 0.0  # monotonic seconds
        self._feeds = 0
        self._texts: RecentTable[str] = RecentTable(TEXT_LIFETIME, MAX_TEXTS)

    def route(self, router: web.UrlDispatcher) -> None:
        """Registers the handlers."""
        router.add_get("/monitor/events", self.events, allow_head=False)
        router.add_get("/monitor/requests/{id}", self.request)
        router.add_get("/monitor/prefixes", self.prefixes)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events until client or gateway leaves, or the client's key is withdrawn.

        A slow reader gets fewer events. Requests of other clients are shown to operators alone.
        """
        if self._feeds >= MAX_FEEDS:
            message = f"{MAX_FEEDS} monitoring pages are already open, and no more are allowed"
            raise ApiError(503, message, code="too_many_pages")
        response = web.StreamResponse(headers=EVENT_STREAM_HEADERS)
        self._feeds += 1
        try:
            with self._monitor.watching(), contextlib.suppress(ConnectionResetError):
                await response.prepare(request)
                seen = 0
                while not self._monitor.leaving and (principal := self._principal(request)):
                    event, seen = self._event(seen, principal)
                    await response.write(event)
                    await asyncio.sleep(EVENT_INTERVAL)
        finally:
            self._feeds -= 1
        return response

    async def request(self, request: web.Request) -> web.StreamResponse:
        """The spans of a request in all stages."""
        name, principal = request.match_info["id"], self._context.admission.principal(request)
        allowed = principal.operator or self._monitor.is_owner(name, principal.sees)
        spans = self._monitor.spans(name) if allowed else []
        if not spans:
            raise ApiError(404, f"no spans of a request {name[:200]!r} are known", code="not_seen")
        return _struct_response(RequestSpans(name, [_stage_span(one) for one in spans]))

    async def prefixes(self, request: web.Request) -> web.StreamResponse:
        """The largest cached prefixes of each group.

        Their texts are prompts of clients: operators alone see them, and salted ones are not shown.
        """
        rows = self._context.core.health.stages.values()
        engines = {row.stage: row.group for row in rows if row.name == "engine" and row.rank == 0}
        found = await self._monitor.prefixes(tuple(engines), MAX_PREFIXES)
        with_text = self._context.admission.principal(request).operator
        groups = [
            GroupPrefixes(
                group, [await self._prefix(one, with_text) for one in found.get(engine, ())]
            )
            for engine, group in engines.items()
        ]
        return _struct_response(CachedPrefixes(groups))

    async def _prefix(self, prefix: Prefix, with_text: bool) -> CachedPrefix:
        cached = CachedPrefix(prefix.tokens, prefix.sequences, prefix.locks)
        if not with_text or not prefix.first:
            return cached
        ids = unpack(prefix.first).tolist()
        return msgspec.structs.replace(cached, ids=ids, text=await self._text(ids))

    async def _text(self, ids: list[int]) -> str:
        name, now = str(ids), time.monotonic()
        text = self._texts.get(name)
        if text is None:
            text = await self._detokenize(ids)
            self._texts.put(name, text, now)
        return text

    async def _detokenize(self, ids: list[int]) -> str:
        call = detokenize_call(
            DetokenizeRequest(tokens=ids), f"tok-{uuid.uuid4().hex}", self._context.defaults
        )
        sink = EncodedPromptSink()
        async with self._context.sessions.open([call], sink):
            return (await sink.prompt()).prompt_text[:MAX_PREFIX_LETTERS]

    def _principal(self, request: web.Request) -> Principal | None:
        """None if the request's key was withdrawn."""
        try:
            return self._context.admission.principal(request)
        except ApiError:
            return None

    def _event(self, seen: int, principal: Principal) -> tuple[bytes, int]:
        """The event with all after change number `seen`, and the number of the latest change."""
        monitor = self._monitor
        event = msgspec.structs.asdict(self._current_snapshot()) | {
            "time": time.time(),
            "model": self._context.model,
            "version": __version__,
            "context_length": self._context.context_length,
            "steps": monitor.steps_since(seen),
            "requests": monitor.requests_since(
                seen, None if principal.operator else principal.sees
            ),
        }
        return b"data: " + _encode(event) + b"\n\n", monitor.changes

    def _current_snapshot(self) -> PipelineSnapshot:
        """A snapshot that all feeds share which need one at about the same time."""
        now = time.monotonic()
        if self._snapshot is None or now - self._snapshot_at > EVENT_INTERVAL / 2:
            status, latency = self._context.core.status, self._monitor.latency
            self._rates.update()
            self._snapshot = self._rates.snapshot(status, now, time.time(), latency)
            self._snapshot_at = now
        return self._snapshot


def _stage_span(span: RequestSpan) -> StageSpan:
    return StageSpan(
        stage=span.stage,
        began=span.began,
        ended=span.ended or None,
        outcome=span.outcome,
        moments=[SpanEvent(one.at, one.name, one.values) for one in span.moments],
    )


def _struct_response(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=_encode(answer), content_type="application/json")

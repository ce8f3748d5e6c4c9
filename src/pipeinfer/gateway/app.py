"""The HTTP application: routes, middlewares, and errors in OpenAI's form.

Knows the schema, the sessions and the health table; the pipeline behind them is not its business.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from functools import cache

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from pipeinfer.gateway import openapi
from pipeinfer.gateway.adapter_handlers import (
    MESSAGES_PATHS,
    AdapterHandlers,
    adapted_error_response,
)
from pipeinfer.gateway.auth import REQUEST_ID, x_request_id
from pipeinfer.gateway.errors import ApiError, Handler, http_error, json_response, renamed
from pipeinfer.gateway.page import PAGE_HEADERS, MonitorHandlers, Page
from pipeinfer.gateway.requests import ParsedRequest, parse_chat, parse_completion
from pipeinfer.gateway.response_encoders import (
    BestOf,
    FullResponseEncoder,
    ResponseEncoder,
    StreamEncoder,
)
from pipeinfer.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pipeinfer.gateway.serving import (
    IGNORED_SCHEMA,
    Service,
    Serving,
    client_trace,
    detokenize_call,
    tokenize_call,
    tokenize_response,
)
from pipeinfer.gateway.sessions import RESET_TIMEOUT
from pipeinfer.params import JsonObject, JsonValue
from pipeinfer.version import __version__

log = logging.getLogger(__name__)


def build_app(service: Service) -> web.Application:
    """The application. Its runner must be made with handler_cancellation=True, and its connections
    with auto_decompress=False: bodies are decompressed here, within their bound."""
    handlers = _Handlers(service)
    app = web.Application(
        middlewares=[
            service.access_log.middleware(),
            handlers.errors,
            service.browsers.cors.middleware(),
            service.browsers.middleware(),
            service.admission.middleware(),
        ],
    )
    app.on_response_prepare.append(_add_headers)
    app.on_response_prepare.append(service.browsers.cors.add_cors_headers)
    app.on_response_prepare.append(service.admission.add_limit_headers)
    handlers.route(app.router)
    return app


async def _continue_later(request: web.Request) -> None:
    """100 Continue is sent when the body is read, behind key and limits."""


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._serving = Serving(service)
        self._adapters = AdapterHandlers(self._serving)

    def route(self, router: web.UrlDispatcher) -> None:
        """Registers all routes."""
        router.add_get("/health", self.health)
        router.add_get("/health/live", self.live)
        router.add_get("/health/ready", self.ready)
        router.add_get("/metrics", self.metrics)
        router.add_get("/version", self.version)
        router.add_get("/openapi.json", self.openapi)
        router.add_get("/docs", self.docs)
        router.add_get("/ping", self.live)  # what SageMaker asks
        router.add_post("/ping", self.live)
        for path in (str, slash_tolerant):
            router.add_get(path("/v1/models"), self.list_models)
            router.add_get(path("/v1/models/") + "{model:.+}", self.retrieve_model)
            for name, handler in (
                ("/v1/chat/completions", self.chat),
                ("/v1/completions", self.completions),
                ("/v1/embeddings", self.embeddings),
                *self._adapters.routes().items(),
            ):
                router.add_post(path(name), handler, expect_handler=_continue_later)
        router.add_post("/tokenize", self.tokenize, expect_handler=_continue_later)
        router.add_post("/detokenize", self.detokenize, expect_handler=_continue_later)
        router.add_get("/tokenizer_info", self.tokenizer_info)
        router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        page = Page()
        page.route_docs(router)
        if self._service.monitor is not None:
            page.route(router)
            MonitorHandlers(self._service, self._service.monitor).route(router)

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
        base = f"chatcmpl-{uuid.uuid4().hex}"
        body = await self._serving.read_body(request, ChatRequest)
        job = parse_chat(body, base, self._service.terms, client_trace(request))
        del body  # an answer takes minutes, in which the core has all that is needed
        return await self._generate(request, base, job, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        base = f"cmpl-{uuid.uuid4().hex}"
        body = await self._serving.read_body(request, CompletionRequest)
        job = parse_completion(body, base, self._service.terms, client_trace(request))
        del body
        return await self._generate(request, base, job, chat=False)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read_body(request, TokenizeRequest)
        call = tokenize_call(body, f"tok-{uuid.uuid4().hex}", self._service.terms)
        prompt = await self._serving.encode_prompt(request, call)
        return json_response(tokenize_response(prompt, self._service.context_length))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._serving.read_body(request, DetokenizeRequest)
        call = detokenize_call(body, f"tok-{uuid.uuid4().hex}", self._service.terms)
        try:
            prompt = await self._serving.encode_prompt(request, call)
        except ApiError as error:
            raise renamed(error, {"prompt": "tokens"}) from None
        return json_response({"prompt": prompt.prompt_text})

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """As vLLM's /tokenizer_info."""
        return web.Response(body=self._service.tokenizer_info, content_type="application/json")

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        """As vLLM's; the body is not read."""
        self._serving.check_capacity(0)
        stages = self._service.core.health.stages.values()
        missing = await self._service.sessions.reset_caches(stages)
        if missing:
            message = f"groups {sorted(missing)} have not answered within {RESET_TIMEOUT:g} s"
            raise ApiError(503, message, code="reset_unanswered", retry_after=1)
        return web.Response()

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(501, "this server's model makes no embeddings", code="not_implemented")

    async def _generate(
        self, request: web.Request, base: str, job: ParsedRequest, chat: bool
    ) -> web.StreamResponse:
        answer = self._serving.new_answer(base, job, chat)
        encoder: ResponseEncoder = (
            StreamEncoder(answer, job.choices, job.include_usage, job.continuous_usage)
            if job.stream
            else FullResponseEncoder(answer, job.choices, _best_of(job))
        )
        return await self._serving.respond(request, job, encoder)

    # -------------------------------------------------------------------------------------- models

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        self._check_ready()
        return json_response({"object": "list", "data": [self._model_card()]})

    async def retrieve_model(self, request: web.Request) -> web.StreamResponse:
        self._serving.check_model(request.match_info["model"])
        self._check_ready()
        return json_response(self._model_card())

    def _check_ready(self) -> None:
        core = self._service.core
        if not core.can_serve():
            raise ApiError(
                503,
                f"the server is {core.status}: {core.health.reason()}",
                code=core.status,
                retry_after=1,
            )

    def _model_card(self) -> JsonObject:
        service = self._service
        model: JsonObject = {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "pipeinfer",
            "root": service.model,
            "parent": None,
        }
        if service.context_length:
            model["max_model_len"] = service.context_length
        return model

    # -------------------------------------------------------------------------------------- health

    async def live(self, request: web.Request) -> web.StreamResponse:
        return json_response({"status": "live"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        core = self._service.core
        status = 200 if core.can_serve() else 503
        return json_response({"status": core.status, "reason": core.health.reason()}, status)

    async def health(self, request: web.Request) -> web.StreamResponse:
        core = self._service.core
        stages: list[JsonValue] = [
            {
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
        status = 200 if core.status in ("ready", "degraded") else 503
        return json_response({"status": core.status, "stages": stages}, status)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        accepted = request.headers.get("Accept", "")
        exposition, kind = self._service.metrics.exposition(accepted)
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
    del response.headers["Server"]  # what software answers is nobody's business


def _kv_cache_dtype(stats: Mapping[str, float]) -> JsonObject:
    """The dtype of an engine's KV pages as `--kv-cache-dtype` has it; {} for other stages."""
    if "kv_fp8" not in stats:
        return {}
    return {"kv_cache_dtype": "fp8_e4m3" if stats["kv_fp8"] else "auto"}


def _best_of(job: ParsedRequest) -> BestOf | None:
    """Chooses the choices that are sent, if not all are; else None."""
    if not job.best_of:
        return None
    with_logprobs = job.output_options.logprobs is not None
    return BestOf(job.choices, job.choices // job.prompts, job.best_of, with_logprobs)

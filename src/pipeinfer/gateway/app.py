"""The HTTP application: routes, authentication, and errors in OpenAI's form.

Knows the schema, the port and the health table; the pipeline behind the port is not its business.
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
from pipeinfer.gateway.access import REQUEST_ID, name_of
from pipeinfer.gateway.adapter_handlers import (
    MESSAGES_PATHS,
    AdapterHandlers,
    adapted_error_response,
)
from pipeinfer.gateway.answering import LEFT_OUT, Answering, trace
from pipeinfer.gateway.cache_resets import RESET
from pipeinfer.gateway.errors import ApiError, renamed
from pipeinfer.gateway.monitor.handlers import MonitorHandlers
from pipeinfer.gateway.page import HEADERS, Page
from pipeinfer.gateway.requests import ParsedRequest, parse_chat, parse_completion
from pipeinfer.gateway.response_encoders import (
    BestOf,
    FullResponseEncoder,
    ResponseEncoder,
    StreamEncoder,
)
from pipeinfer.gateway.responses import Handler, json_response, of_http
from pipeinfer.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pipeinfer.gateway.service import Service
from pipeinfer.gateway.tokenizing import detokenize_call, tokenize_call, tokens_shown
from pipeinfer.json_values import JsonObject, JsonValue
from pipeinfer.version import __version__

log = logging.getLogger(__name__)


def build_app(service: Service) -> web.Application:
    """The application. Its runner must be made with handler_cancellation=True, and its connections
    with auto_decompress=False: bodies are decompressed here, within their bound."""
    handlers = _Handlers(service)
    app = web.Application(
        middlewares=[
            service.access.middleware(),
            handlers.errors,
            service.pages.cors.middleware(),
            service.pages.middleware(),
            service.admission.middleware(),
        ],
    )
    app.on_response_prepare.append(_name_response)
    app.on_response_prepare.append(service.pages.cors.say_allowed)
    app.on_response_prepare.append(service.admission.say_limits)
    handlers.route(app.router)
    return app


async def _later(request: web.Request) -> None:
    """Who asks before sending a body is answered when it is read, behind key and limits."""


class _Handlers:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._answering = Answering(service)
        self._dialects = AdapterHandlers(self._answering)

    def route(self, router: web.UrlDispatcher) -> None:
        """Says which path is whose."""
        router.add_get("/health", self.health)
        router.add_get("/health/live", self.live)
        router.add_get("/health/ready", self.ready)
        router.add_get("/metrics", self.metrics)
        router.add_get("/version", self.version)
        router.add_get("/openapi.json", self.openapi)
        router.add_get("/docs", self.docs)
        router.add_get("/ping", self.live)  # what SageMaker asks
        router.add_post("/ping", self.live)
        for path in (str, loose):
            router.add_get(path("/v1/models"), self.models)
            router.add_get(path("/v1/models/") + "{model:.+}", self.one_model)
            for name, handler in (
                ("/v1/chat/completions", self.chat),
                ("/v1/completions", self.completions),
                ("/v1/embeddings", self.embeddings),
                *self._dialects.routes().items(),
            ):
                router.add_post(path(name), handler, expect_handler=_later)
        router.add_post("/tokenize", self.tokenize, expect_handler=_later)
        router.add_post("/detokenize", self.detokenize, expect_handler=_later)
        router.add_get("/tokenizer_info", self.tokenizer_info)
        router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        page = Page()
        page.route_docs(router)
        if self._service.sight is not None:
            page.route(router)
            MonitorHandlers(self._service, self._service.sight).route(router)

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
                response = adapted_error_response(request, of_http(request, error))
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
        body = await self._answering.body(request, ChatRequest)
        job = parse_chat(body, base, self._service.terms, trace(request))
        del body  # an answer takes minutes, in which the core has all that is needed
        return await self._answer(request, base, job, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        base = f"cmpl-{uuid.uuid4().hex}"
        body = await self._answering.body(request, CompletionRequest)
        job = parse_completion(body, base, self._service.terms, trace(request))
        del body
        return await self._answer(request, base, job, chat=False)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._answering.body(request, TokenizeRequest)
        call = tokenize_call(body, f"tok-{uuid.uuid4().hex}", self._service.terms)
        prompt = await self._answering.encoded(request, call)
        return json_response(tokens_shown(prompt, self._service.context_length))

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        body = await self._answering.body(request, DetokenizeRequest)
        call = detokenize_call(body, f"tok-{uuid.uuid4().hex}", self._service.terms)
        try:
            prompt = await self._answering.encoded(request, call)
        except ApiError as error:
            raise renamed(error, {"prompt": "tokens"}) from None
        return json_response({"prompt": prompt.prompt_text})

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """As vLLM's."""
        return web.Response(body=self._service.tokenizer_info, content_type="application/json")

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        """As vLLM's; what is in the body, if anything, says nothing."""
        self._answering.check_room(0)
        stages = self._service.core.health.rows.values()
        missing = await self._service.port.reset_caches(stages)
        if missing:
            message = f"groups {sorted(missing)} have not answered within {RESET:g} s"
            raise ApiError(503, message, code="reset_unanswered", retry_after=1)
        return web.Response()

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(501, "this server's model makes no embeddings", code="not_implemented")

    async def _answer(
        self, request: web.Request, base: str, job: ParsedRequest, chat: bool
    ) -> web.StreamResponse:
        answer = self._answering.said(base, job, chat)
        outlet: ResponseEncoder = (
            StreamEncoder(answer, job.choices, job.include_usage, job.continuous_usage)
            if job.stream
            else FullResponseEncoder(answer, job.choices, _best(job))
        )
        return await self._answering.respond(request, job, outlet)

    # -------------------------------------------------------------------------------------- models

    async def models(self, request: web.Request) -> web.StreamResponse:
        self._check_answering()
        return json_response({"object": "list", "data": [self._model()]})

    async def one_model(self, request: web.Request) -> web.StreamResponse:
        self._answering.check_model(request.match_info["model"])
        self._check_answering()
        return json_response(self._model())

    def _check_answering(self) -> None:
        core = self._service.core
        if not core.answering():
            raise ApiError(
                503,
                f"the server is {core.status}: {core.health.reason()}",
                code=core.status,
                retry_after=1,
            )

    def _model(self) -> JsonObject:
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
        status = 200 if core.answering() else 503
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
                **_pages(row.stats),
            }
            for row in core.health.rows.values()
        ]
        status = 200 if core.status in ("ready", "degraded") else 503
        return json_response({"status": core.status, "stages": stages}, status)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        wanted = request.headers.get("Accept", "")
        exposition, kind = self._service.metrics.exposition(wanted)
        return web.Response(body=exposition, headers={"Content-Type": kind})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=await asyncio.to_thread(_document), content_type="application/json"
        )

    async def docs(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            text=await asyncio.to_thread(_page), content_type="text/html", headers=HEADERS
        )

    async def version(self, request: web.Request) -> web.StreamResponse:
        return json_response({"version": __version__})


@cache
def _document() -> bytes:
    """Made when it is asked for first."""
    return msgspec.json.encode(openapi.document())


@cache
def _page() -> str:
    return openapi.page(openapi.document())


def loose(path: str) -> str:
    """A route for `path` with any number of slashes in the place of each: clients put a base with
    one at its end before paths with one at their beginning. No other path matches."""
    first, *others = path.removeprefix("/").split("/")
    more = "".join(f"{{_{n}:/+}}{other}" for n, other in enumerate(others))
    return f"/{{_:/*}}{first}{more}"


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    name = name_of(request)
    response.headers[REQUEST_ID] = name
    if MESSAGES_PATHS.fullmatch(request.path):
        response.headers["request-id"] = name  # as Anthropic's clients know it
    if LEFT_OUT in request:
        response.headers["x-schema-left-out"] = request[LEFT_OUT]
    del response.headers["Server"]  # what software answers is nobody's business


def _pages(stats: Mapping[str, float]) -> JsonObject:
    """What an engine's pages hold, as `--kv-cache-dtype` calls it; nothing of other stages."""
    if "kv_fp8" not in stats:
        return {}
    return {"kv_cache_dtype": "fp8_e4m3" if stats["kv_fp8"] else "auto"}


def _best(job: ParsedRequest) -> BestOf | None:
    """Who chooses the choices that are shown, where not all are."""
    if not job.best_of:
        return None
    wanted = job.output_options.logprobs is not None
    return BestOf(job.choices, job.choices // job.prompts, job.best_of, wanted)

"""The document of all endpoints, /openapi.json: from the types that check bodies, and of answers.

One table says which endpoint has which. Knows no handler.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from pipeinfer.gateway import answers, monitor
from pipeinfer.gateway.dialects.messages_body import CountRequest, MessagesRequest
from pipeinfer.gateway.dialects.responses_body import InputTokensRequest, ResponsesRequest
from pipeinfer.gateway.field_help import BY_BODY
from pipeinfer.gateway.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pipeinfer.json_values import JsonObject
from pipeinfer.version import __version__

REF = "#/components/schemas/{name}"
# Of whatever has a body, and of whatever goes through the pipeline.
OF_BODIES = (400, 401, 403, 404, 408, 413, 415, 417, 429)
OF_PIPELINE = (*OF_BODIES, 500, 503)
ERRORS = {
    400: "The body is wrong, or asks for what is not served.",
    401: "The API key is wrong or missing.",
    403: "Without keys: a web page of another site asks, or the server's name is another.",
    404: "Another model is served, or nothing has this name.",
    408: "The body did not come, or no output within the request's timeout.",
    413: "The body is too large.",
    415: "The body is not called JSON, or compressed otherwise than by gzip or deflate.",
    417: "Expect says something else than 100-continue.",
    429: "A limit of the key, or the queue is full.",
    500: "The request failed.",
    501: "The model cannot do this.",
    503: "The server starts, drains, or has too much to do.",
    529: "The server starts, drains, or has too much to do.",
}
STREAM = "Server-sent events"


@dataclass(frozen=True)
class Endpoint:
    """One of them. `more`: what `summary` does not say. `body`, `answer`: their types, None for
    none. `media`: of an answer that is no JSON. `errors`: statuses, each with a body of the type
    `error`. `keyed`: it needs a key where there are any. `also`: further statuses with the
    answer's own body."""

    method: str
    path: str
    summary: str
    body: type[Body] | None = None
    answer: type[msgspec.Struct] | None = None
    media: str = "application/json"
    streams: bool = False
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] = answers.Error
    keyed: bool = False
    also: tuple[int, ...] = ()
    more: str = ""

    def operation(self) -> JsonObject:
        """As OpenAPI says it."""
        made: JsonObject = {"summary": self.summary, "operationId": self._name()}
        if self.more:
            made["description"] = self.more
        named = re.findall(r"\{(\w+)\}", self.path)
        if named:
            made["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in named
            ]
        if self.body is not None:
            content: JsonObject = {"application/json": {"schema": _ref(self.body)}}
            made["requestBody"] = {"required": True, "content": content}
        made["responses"] = self._responses()
        if self.keyed:
            made["security"] = [{"bearer": []}, {"x-api-key": []}]
        return made

    def _name(self) -> str:
        words = self.path.replace("{", "").replace("}", "").replace(".", "_").split("/")
        return "_".join((self.method, *filter(None, words)))

    def _responses(self) -> JsonObject:
        content: JsonObject = {}
        if self.answer is not None:
            content[self.media] = {"schema": _ref(self.answer)}
        elif self.media != "application/json":
            content[self.media] = {"schema": {"type": "string"}}
        said = "The answer."
        if self.streams:
            when = ", where the body says `stream: true`." if self.body is not None else "."
            content["text/event-stream"] = {"schema": {"description": STREAM + when}}
        made: JsonObject = {}
        for status in (200, *self.also):
            made[str(status)] = {"description": said, **({"content": content} if content else {})}
        for status in self.errors:
            body: JsonObject = {"application/json": {"schema": _ref(self.error)}}
            made[str(status)] = {"description": ERRORS[status], "content": body}
        return made


def _asked(
    path: str,
    summary: str,
    body: type[Body],
    answer: type[msgspec.Struct],
    more: str,
) -> Endpoint:
    """One that the pipeline answers; with a stream if the body can ask for one."""
    return Endpoint(
        method="post",
        path=path,
        summary=summary,
        body=body,
        answer=answer,
        streams="stream" in body.__struct_fields__,
        errors=OF_PIPELINE,
        keyed=True,
        more=more,
    )


def _as_messages(endpoint: Endpoint) -> Endpoint:
    """With errors of Anthropic's form."""
    errors = tuple(529 if status == 503 else status for status in endpoint.errors)
    return replace(endpoint, errors=errors, error=answers.MessageError)


def _shown(
    path: str, summary: str, answer: type[msgspec.Struct], more: str, *also: int
) -> Endpoint:
    """One that says how things are."""
    return Endpoint(method="get", path=path, summary=summary, answer=answer, also=also, more=more)


def _models(
    path: str, summary: str, answer: type[msgspec.Struct], more: str, *errors: int
) -> Endpoint:
    made = _shown(path, summary, answer, more)
    return replace(made, errors=(401, 403, *errors, 503), keyed=True)


def _seen(
    path: str, summary: str, answer: type[msgspec.Struct], more: str, *errors: int
) -> Endpoint:
    """One of /monitor."""
    return replace(_shown(path, summary, answer, more), errors=errors, keyed=True)


_chat = _asked(
    "/v1/chat/completions",
    "Answers a chat.",
    ChatRequest,
    answers.ChatAnswer,
    "OpenAI's. The checkpoint's chat template makes the prompt.",
)
_texts = _asked(
    "/v1/completions",
    "Continues prompts.",
    CompletionRequest,
    answers.TextAnswer,
    "OpenAI's. Prompts are texts or token ids, in which control tokens are recognised.",
)
_response = _asked(
    "/v1/responses",
    "A chat by items.",
    ResponsesRequest,
    answers.Response,
    "OpenAI's Responses API without memory: each request brings its whole conversation.",
)
_input_tokens = _asked(
    "/v1/responses/input_tokens",
    "How long a response's prompt is.",
    InputTokensRequest,
    answers.InputTokenCount,
    "Takes a body of /v1/responses.",
)
_message = _asked(
    "/v1/messages",
    "A chat by blocks.",
    MessagesRequest,
    answers.MessageAnswer,
    "Anthropic's Messages API. Errors have Anthropic's form.",
)
_count = _asked(
    "/v1/messages/count_tokens",
    "How long a prompt is.",
    CountRequest,
    answers.TokenCount,
    "Takes a body of /v1/messages, and needs no `max_tokens`.",
)
_ids = _asked(
    "/tokenize",
    "The ids of a prompt.",
    TokenizeRequest,
    answers.TokenIds,
    "Of a `prompt`, or of `messages` by the chat template.",
)
_text = _asked(
    "/detokenize",
    "The text of ids.",
    DetokenizeRequest,
    answers.PromptText,
    "Special tokens are included.",
)
_info = Endpoint(
    method="get",
    path="/tokenizer_info",
    summary="The tokenizer's configuration.",
    answer=answers.TokenizerInfo,
    errors=(401, 403),
    keyed=True,
    more="vLLM's. What tokenizer_config.json says, names of files aside, and the chat template in "
    "use. Named tokens are texts, or null.",
)
_reset = Endpoint(
    method="post",
    path="/reset_prefix_cache",
    summary="Forgets cached prefixes that no request uses.",
    errors=(401, 403, 429, 503),
    keyed=True,
    more="All groups forget. With 200, what is asked after that finds none of what was cached. "
    "Requests that run keep their prefixes, and leave them in the cache. 503 with code "
    "`reset_unanswered` if a group does not answer within 10 s.",
)
_embeddings = Endpoint(
    method="post",
    path="/v1/embeddings",
    summary="Not served.",
    errors=(401, 403, 429, 501),
    keyed=True,
    more="Always 501: models generate.",
)
_ping = _shown("/ping", "As /health/live.", answers.Liveness, "200 while the gateway runs.")
ENDPOINTS: tuple[Endpoint, ...] = (
    _chat,
    _texts,
    _response,
    _input_tokens,
    _as_messages(_message),
    _as_messages(_count),
    _models(
        "/v1/models",
        "The one model.",
        answers.Models,
        "503 while a request would not be answered.",
    ),
    _models(
        "/v1/models/{model}",
        "One model.",
        answers.Model,
        "`max_model_len` is the most tokens of prompt and output. `root` is the model's name "
        "here, and `parent` is null.",
        404,
    ),
    _embeddings,
    _ids,
    _text,
    _info,
    _reset,
    _shown(
        "/health",
        "The status of all stages.",
        answers.PipelineHealth,
        "200 if the status is `ready` or `degraded`, else 503.",
        503,
    ),
    _shown(
        "/health/live",
        "Whether the gateway runs.",
        answers.Liveness,
        "200 while the gateway runs.",
    ),
    _shown(
        "/health/ready",
        "Whether requests are answered.",
        answers.Readiness,
        "200 if a request that came now would be answered without a pause, else 503.",
        503,
    ),
    _ping,
    replace(_ping, method="post"),
    _shown("/version", "The version.", answers.Version, "The version of pipeinfer."),
    Endpoint(
        method="get",
        path="/metrics",
        summary="Prometheus metrics.",
        media="text/plain",
        more="As OpenMetrics to who accepts it. It needs no key and has no limit.",
    ),
    Endpoint(
        method="get",
        path="/openapi.json",
        summary="This document.",
        media="application/json; charset=utf-8",
        more="OpenAPI 3.1, from the types by which bodies are checked.",
    ),
    Endpoint(
        method="get",
        path="/docs",
        summary="This document as a page.",
        media="text/html",
        more="The page has no scripts and loads nothing.",
    ),
    Endpoint(
        method="get",
        path="/",
        summary="The web page.",
        media="text/html",
        more="Not with `--no-page`.",
    ),
    Endpoint(
        method="get",
        path="/docs/{name}",
        summary="A file of /docs.",
        media="*/*",
        errors=(404,),
        more="Its style, its script and its icon; also with `--no-page`.",
    ),
    Endpoint(
        method="get",
        path="/page/{name}",
        summary="A file of the web page.",
        media="*/*",
        errors=(404,),
        more="Not with `--no-page`.",
    ),
    Endpoint(
        method="get",
        path="/monitor/events",
        summary="What the pipeline does, again and again.",
        streams=True,
        errors=(401, 403, 503),
        keyed=True,
        more="The web page's feed. At most 64 are open at a gateway. Not with `--no-page`.",
    ),
    _seen(
        "/monitor/requests/{id}",
        "A request's way.",
        monitor.RequestSpans,
        "When it came to each stage, and what happened there. Not with `--no-page`.",
        401,
        403,
        404,
    ),
    _seen(
        "/monitor/prefixes",
        "The largest cached prefixes.",
        monitor.CachedPrefixes,
        "Of each group. Not with `--no-page`.",
        401,
        403,
    ),
)


def document() -> JsonObject:
    """OpenAPI 3.1."""
    paths: JsonObject = {}
    for endpoint in ENDPOINTS:
        operations = paths.setdefault(endpoint.path, {})
        assert isinstance(operations, dict)
        operations[endpoint.method] = endpoint.operation()
    _, components = msgspec.json.schema_components(list(_types(ENDPOINTS)), ref_template=REF)
    for kind, fields in BY_BODY.items():
        properties = components[kind.__name__]["properties"]
        for name, field in fields.items():
            properties[name]["description"] = field.description()
    return {
        "openapi": "3.1.0",
        "info": {"title": "pipeinfer", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": dict(components),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _types(endpoints: Iterable[Endpoint]) -> dict[type[msgspec.Struct], None]:
    """Each once, in order."""
    found: dict[type[msgspec.Struct], None] = {}
    for one in endpoints:
        found |= {kind: None for kind in (one.body, one.answer, one.error) if kind is not None}
    return found


def _ref(kind: type[msgspec.Struct]) -> JsonObject:
    return {"$ref": REF.format(name=kind.__name__)}

"""The document of all endpoints, /openapi.json: from the types that check bodies, and of answers.

One table says which endpoint has which. Knows no handler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import get_args

import msgspec

from pipeinfer.gateway import monitor, response_types
from pipeinfer.gateway.anthropic import CountRequest, MessagesRequest
from pipeinfer.gateway.lora import LoadAdapterRequest, UnloadAdapterRequest
from pipeinfer.gateway.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from pipeinfer.gateway.responses_api import InputTokensRequest, ResponsesRequest
from pipeinfer.gateway.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pipeinfer.messages import SleepMode
from pipeinfer.params import JsonObject, JsonValue
from pipeinfer.version import __version__

REF = "#/components/schemas/{name}"
# Errors of all endpoints with a body, and of those whose requests go through the pipeline.
OF_BODIES = (400, 401, 403, 404, 408, 413, 415, 417, 429)
OF_PIPELINE = (*OF_BODIES, 500, 503)
ERRORS = {
    400: "The body is wrong, or asks for what is not served.",
    401: "The API key is wrong or missing.",
    403: "Without keys: a web page of another site asks, or the server's name is another.",
    404: "Another model is served, or nothing has this name.",
    410: "It was kept, and is not any more.",
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
class EndpointDoc:
    """An endpoint as the reference and /openapi.json describe it.

    Attributes:
    - summary, details: a line, and sentences in Markdown
    - body, answer: types of the request's and the response's body; None: there is none
    - media: content type of the answer
    - streams: the answer may be server-sent events
    - errors: statuses, each with a body of the type `error`
    - keyed: needs a key if the server has keys
    - also: further statuses with the body of `answer`
    - query: parameters of the query, with what they may be, of which the first is the default;
      without choices a number
    """

    method: str
    path: str
    summary: str
    body: type[Body] | None = None
    answer: type[msgspec.Struct] | None = None
    media: str = "application/json"
    streams: bool = False
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] = response_types.Error
    keyed: bool = False
    also: tuple[int, ...] = ()
    details: str = ""
    query: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def operation(self) -> JsonObject:
        """The endpoint as an OpenAPI operation."""
        made: JsonObject = {"summary": self.summary, "operationId": self._name()}
        if self.details:
            made["description"] = self.details
        named = re.findall(r"\{(\w+)\}", self.path)
        parameters: list[JsonValue] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in named
        ]
        for name, choices in self.query:
            schema: JsonObject = {"type": "integer", "minimum": 0}
            if choices:
                schema = {"type": "string", "enum": [*choices], "default": choices[0]}
            parameters.append({"name": name, "in": "query", "schema": schema})
        if parameters:
            made["parameters"] = parameters
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
        description = "The answer."
        if self.streams:
            when = ", where the body says `stream: true`." if self.body is not None else "."
            content["text/event-stream"] = {"schema": {"description": STREAM + when}}
        made: JsonObject = {}
        for status in (200, *self.also):
            made[str(status)] = {
                "description": description,
                **({"content": content} if content else {}),
            }
        for status in self.errors:
            body: JsonObject = {"application/json": {"schema": _ref(self.error)}}
            made[str(status)] = {"description": ERRORS[status], "content": body}
        return made


def _generating(
    path: str,
    summary: str,
    body: type[Body],
    answer: type[msgspec.Struct] | None,
    details: str,
) -> EndpointDoc:
    """An endpoint whose requests go through the pipeline; streams if its body has `stream`."""
    return EndpointDoc(
        method="post",
        path=path,
        summary=summary,
        body=body,
        answer=answer,
        streams="stream" in body.__struct_fields__,
        errors=OF_PIPELINE,
        keyed=True,
        details=details,
    )


def _as_messages(endpoint: EndpointDoc) -> EndpointDoc:
    """The endpoint with errors in Anthropic's form."""
    errors = tuple(529 if status == 503 else status for status in endpoint.errors)
    return replace(endpoint, errors=errors, error=response_types.MessageError)


def _readable(
    path: str, summary: str, answer: type[msgspec.Struct], details: str, *also: int
) -> EndpointDoc:
    """An endpoint of GET that needs no key."""
    return EndpointDoc(
        method="get", path=path, summary=summary, answer=answer, also=also, details=details
    )


def _model_list(
    path: str, summary: str, answer: type[msgspec.Struct], details: str, *errors: int
) -> EndpointDoc:
    made = _readable(path, summary, answer, details)
    return replace(made, errors=(401, 403, *errors, 503), keyed=True)


def _monitoring(
    path: str, summary: str, answer: type[msgspec.Struct], details: str, *errors: int
) -> EndpointDoc:
    """An endpoint of /monitor."""
    return replace(_readable(path, summary, answer, details), errors=errors, keyed=True)


_chat = _generating(
    "/v1/chat/completions",
    "Answers a chat.",
    ChatRequest,
    response_types.ChatAnswer,
    "OpenAI's. The checkpoint's chat template makes the prompt.",
)
_texts = _generating(
    "/v1/completions",
    "Continues prompts.",
    CompletionRequest,
    response_types.TextAnswer,
    "OpenAI's. Prompts are texts or token ids, in which control tokens are recognised.",
)
_response = _generating(
    "/v1/responses",
    "A chat by items.",
    ResponsesRequest,
    response_types.Response,
    "OpenAI's Responses API. With `background: true` the response is computed without a "
    "connection; with `--store` it is stored.",
)
_kept = EndpointDoc(
    method="get",
    path="/v1/responses/{id}",
    summary="A response that is kept.",
    answer=response_types.Response,
    streams=True,
    errors=(400, 401, 403, 404, 410, 500),
    keyed=True,
    query=(("stream", ("false", "true")), ("starting_after", ())),
    details="OpenAI's, of a stored or background response, or one whose stream outlives its "
    "connection. With `stream=true` the events, those behind number `starting_after`.",
)
_cancelled = replace(
    _kept,
    method="post",
    path="/v1/responses/{id}/cancel",
    summary="Ends a background response.",
    streams=False,
    query=(),
    details="OpenAI's. One that has ended stays as it is.",
)
_deleted = replace(
    _cancelled,
    method="delete",
    path="/v1/responses/{id}",
    summary="Forgets a response.",
    answer=response_types.DeletedResponse,
    details="OpenAI's. One that runs is aborted.",
)
_items = replace(
    _kept,
    path="/v1/responses/{id}/input_items",
    summary="Of what a response's prompt was made.",
    answer=response_types.InputItems,
    streams=False,
    query=(("order", ("desc", "asc")), ("limit", ())),
    details="OpenAI's: at most `limit` items, 1 to 100, 20 without it, those behind the id "
    "`after`.",
)
_stream = replace(
    _kept,
    path="/v1/streams/{id}",
    summary="Goes on with a stream whose connection was lost.",
    answer=None,
    query=(),
    details="The events behind the one that the header `Last-Event-ID` names, all without it. For "
    "streams with event ids: see `--reattach`, and the headers `x-pipeinfer-reattach` and "
    "`x-pipeinfer-detached`. Another gateway of the server may have begun the stream.",
)
_ended_stream = replace(
    _stream,
    method="delete",
    summary="Ends a stream, and forgets it.",
    answer=response_types.DeletedStream,
    streams=False,
    details="One that runs is aborted.",
)
_input_tokens = _generating(
    "/v1/responses/input_tokens",
    "How long a response's prompt is.",
    InputTokensRequest,
    response_types.InputTokenCount,
    "Takes a body of /v1/responses.",
)
_message = _generating(
    "/v1/messages",
    "A chat by blocks.",
    MessagesRequest,
    response_types.MessageAnswer,
    "Anthropic's Messages API. Errors have Anthropic's form.",
)
_count = _generating(
    "/v1/messages/count_tokens",
    "How long a prompt is.",
    CountRequest,
    response_types.TokenCount,
    "Takes a body of /v1/messages, and needs no `max_tokens`.",
)
_ids = _generating(
    "/tokenize",
    "The ids of a prompt.",
    TokenizeRequest,
    response_types.TokenIds,
    "Of a `prompt`, or of `messages` by the chat template.",
)
_text = _generating(
    "/detokenize",
    "The text of ids.",
    DetokenizeRequest,
    response_types.PromptText,
    "Special tokens are included.",
)
_info = EndpointDoc(
    method="get",
    path="/tokenizer_info",
    summary="The tokenizer's configuration.",
    answer=response_types.TokenizerInfo,
    errors=(401, 403),
    keyed=True,
    details="vLLM's. What tokenizer_config.json says, names of files aside, and the chat template "
    "in use. Named tokens are texts, or null.",
)
_reset = EndpointDoc(
    method="post",
    path="/reset_prefix_cache",
    summary="Forgets cached prefixes that no request uses.",
    errors=(401, 403, 429, 503),
    keyed=True,
    details="All groups forget. With 200, what is asked after that finds none of what was cached. "
    "Requests that run keep their prefixes, and leave them in the cache. 503 with code "
    "`reset_unanswered` if a group does not answer within 10 s.",
)
_load_adapter = replace(
    _generating(
        "/v1/load_lora_adapter",
        "Serves one more adapter.",
        LoadAdapterRequest,
        None,
        "vLLM's. It answers when a token was computed with the adapter, with a text. Only with an "
        "API key, and where some keys are marked `admin`, with one of those. 400 with code "
        "`adapter_not_loaded` for files that are not served; 501 without `--enable-lora`.",
    ),
    errors=(*OF_PIPELINE, 501),
    media="text/plain",
)
_unload_adapter = replace(
    _generating(
        "/v1/unload_lora_adapter",
        "Serves an adapter no more.",
        UnloadAdapterRequest,
        None,
        "vLLM's. Requests that run go on. 404 for a name that no adapter has; 501 without "
        "`--enable-lora`.",
    ),
    errors=(*OF_PIPELINE, 501),
    media="text/plain",
)
_sleep = EndpointDoc(
    method="post",
    path="/sleep",
    summary="Gives the memory of weights and pages back until /wake_up.",
    errors=(400, 401, 403, 429, 501, 503),
    keyed=True,
    query=(
        ("level", ("1", "2")),
        ("mode", get_args(SleepMode)),
        ("wait", ("true", "false")),
    ),
    details="vLLM's; it answers when all groups sleep. Where some keys are marked `admin`, it "
    "takes one of those. At `level` 1 weights stay in the host's memory, at 2 they are read anew "
    "at waking. `mode` says what becomes of requests that run: with `wait` they are answered "
    "first, with `abort` they end with what they have, with `keep` they go on at waking. Requests "
    "that come meanwhile wait for /wake_up; with `wait=false` they get 503 with code `asleep`. "
    "The prefix cache is empty afterwards. 501 with code `cannot_sleep` where an engine cannot.",
)
_wake_up = EndpointDoc(
    method="post",
    path="/wake_up",
    summary="Ends /sleep.",
    errors=(400, 401, 403, 429, 503),
    keyed=True,
    details="vLLM's, with the keys of /sleep; it answers when all groups are ready. Weights and "
    "pages come together: vLLM's `tags` must name both, or be left out.",
)
_is_sleeping = EndpointDoc(
    method="get",
    path="/is_sleeping",
    summary="Whether a group sleeps.",
    answer=response_types.Sleeping,
    errors=(401, 403),
    keyed=True,
    details="vLLM's.",
)
_embeddings = replace(
    _generating(
        "/v1/embeddings",
        "Vectors of texts.",
        EmbeddingRequest,
        response_types.EmbeddingResponse,
        "OpenAI's. The vector is the hidden state of the text's last token. 501 where the model "
        "generates texts: see `--task`.",
    ),
    errors=(*OF_PIPELINE, 501),
)
_score = replace(
    _generating(
        "/score",
        "How well texts fit to others.",
        ScoreRequest,
        response_types.ScoreResponse,
        "vLLM's, also under /v1/score. A model of `--task score` is asked, and the score is the "
        "probability of yes. With `--task embed` it is the cosine of both vectors. 501 where the "
        "model generates texts.",
    ),
    errors=(*OF_PIPELINE, 501),
)
_rerank = replace(
    _generating(
        "/v1/rerank",
        "Documents by how well they fit to a query.",
        RerankRequest,
        response_types.Ranking,
        "Cohere's and Jina's, also under /rerank. Scores are those of /score.",
    ),
    errors=(*OF_PIPELINE, 501),
)
_ping = _readable(
    "/ping", "As /health/live.", response_types.Liveness, "200 while the gateway runs."
)
ENDPOINTS: tuple[EndpointDoc, ...] = (
    _chat,
    _texts,
    _response,
    _input_tokens,
    _kept,
    _cancelled,
    _deleted,
    _items,
    _stream,
    _ended_stream,
    _as_messages(_message),
    _as_messages(_count),
    _model_list(
        "/v1/models",
        "The model, and its adapters.",
        response_types.Models,
        "503 while a request would not be answered.",
    ),
    _model_list(
        "/v1/models/{model}",
        "One model.",
        response_types.ModelCard,
        "`max_model_len` is the most tokens of prompt and output. `root` is the model's name "
        "here, and `parent` is null; of an adapter they are its folder and the model.",
        404,
    ),
    _embeddings,
    _score,
    replace(_score, path="/v1/score"),
    _rerank,
    replace(_rerank, path="/rerank"),
    _load_adapter,
    _unload_adapter,
    _ids,
    _text,
    _info,
    _reset,
    _sleep,
    _wake_up,
    _is_sleeping,
    _readable(
        "/health",
        "The status of all stages.",
        response_types.PipelineHealth,
        "200 if the status is `ready`, `degraded` or `asleep`, else 503.",
        503,
    ),
    _readable(
        "/health/live",
        "Whether the gateway runs.",
        response_types.Liveness,
        "200 while the gateway runs.",
    ),
    _readable(
        "/health/ready",
        "Whether requests are answered.",
        response_types.Readiness,
        "200 if a request that came now would be answered without a pause, else 503.",
        503,
    ),
    _ping,
    replace(_ping, method="post"),
    _readable("/version", "The version.", response_types.Version, "The version of pipeinfer."),
    EndpointDoc(
        method="get",
        path="/metrics",
        summary="Prometheus metrics.",
        media="text/plain",
        details="As OpenMetrics for clients that accept it. It needs no key and has no limit.",
    ),
    EndpointDoc(
        method="get",
        path="/openapi.json",
        summary="This document.",
        media="application/json; charset=utf-8",
        details="OpenAPI 3.1, from the types by which bodies are checked.",
    ),
    EndpointDoc(
        method="get",
        path="/docs",
        summary="This document as a page.",
        media="text/html",
        details="Each endpoint can be tried there. The page loads nothing from elsewhere.",
    ),
    EndpointDoc(
        method="get",
        path="/",
        summary="The web page.",
        media="text/html",
        details="Not with `--no-page`.",
    ),
    EndpointDoc(
        method="get",
        path="/docs/{name}",
        summary="A file of /docs.",
        media="*/*",
        errors=(404,),
        details="Its style, its script and its icon; also with `--no-page`.",
    ),
    EndpointDoc(
        method="get",
        path="/page/{name}",
        summary="A file of the web page.",
        media="*/*",
        errors=(404,),
        details="Not with `--no-page`.",
    ),
    EndpointDoc(
        method="get",
        path="/monitor/events",
        summary="What the pipeline does, again and again.",
        streams=True,
        errors=(401, 403, 503),
        keyed=True,
        details="The web page's feed. At most 64 are open at a gateway. Not with `--no-page`.",
    ),
    _monitoring(
        "/monitor/requests/{id}",
        "A request's way.",
        monitor.RequestSpans,
        "When it came to each stage, and what happened there. Not with `--no-page`.",
        401,
        403,
        404,
    ),
    _monitoring(
        "/monitor/prefixes",
        "The largest cached prefixes.",
        monitor.CachedPrefixes,
        "Of each group. Not with `--no-page`.",
        401,
        403,
    ),
)


def document() -> JsonObject:
    """The server's OpenAPI 3.1 document."""
    paths: JsonObject = {}
    for endpoint in ENDPOINTS:
        operations = paths.setdefault(endpoint.path, {})
        assert isinstance(operations, dict)
        operations[endpoint.method] = endpoint.operation()
    _, components = msgspec.json.schema_components(list(_types(ENDPOINTS)), ref_template=REF)
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


def _types(endpoints: Iterable[EndpointDoc]) -> dict[type[msgspec.Struct], None]:
    """Each once, in order."""
    found: dict[type[msgspec.Struct], None] = {}
    for one in endpoints:
        found |= {kind: None for kind in (one.body, one.answer, one.error) if kind is not None}
    return found


def _ref(kind: type[msgspec.Struct]) -> JsonObject:
    return {"$ref": REF.format(name=kind.__name__)}


PREFIX = "#/components/schemas/"
FILES = ("style.css", "docs.css", "docs.js", "icon.svg")  # of page/, below /docs/ as well
CHAT: JsonValue = [{"role": "user", "content": "What are the stages?"}]
# A body that works with any model, by path.
EXAMPLES: dict[str, JsonObject] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 100, "stream": False},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 20},
    "/v1/responses": {"input": "What are the stages?", "max_output_tokens": 100, "store": False},
    "/v1/messages": {"messages": CHAT, "max_tokens": 100},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/embeddings": {"input": ["Once upon a time", "There was a king"]},
    "/score": {"text_1": "Who was king?", "text_2": ["Once upon a time", "There was a king"]},
    "/v1/rerank": {"query": "Who was king?", "documents": ["Once upon a time", "There was a king"]},
    "/v1/load_lora_adapter": {"lora_name": "mine", "lora_path": "/models/mine"},
    "/v1/unload_lora_adapter": {"lora_name": "mine"},
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
PATH_PARAMETER = re.compile(r"\{(\w+)\}")
GROUPS = {
    "/v1/embeddings": "Vectors and scores",
    "/v1/load_lora_adapter": "Tools",
    "/v1/unload_lora_adapter": "Tools",
    "/v1/rerank": "Vectors and scores",
    "/v1/score": "Vectors and scores",
    "/score": "Vectors and scores",
    "/rerank": "Vectors and scores",
    "/v1/": "Models",
    "/monitor": "Pipeline",
    "/page": "Web page",
    "/docs": "Web page",
    "/openapi": "Web page",
    "/health": "Health",
    "/ping": "Health",
    "/version": "Health",
    "/metrics": "Health",
}


def page(document: JsonObject) -> str:
    """All endpoints, then all types."""
    return "\n".join(_html_lines(document))


def _html_lines(document: JsonObject) -> Iterator[str]:
    info = _object(document["info"])
    title = f"{info['title']} {info['version']}"
    groups: dict[str, list[tuple[str, str, JsonObject]]] = {}
    for path, operations in _object(document["paths"]).items():
        for method, operation in _object(operations).items():
            groups.setdefault(_group(path), []).append((method, path, _object(operation)))
    schemas = _object(_object(document["components"])["schemas"])
    yield "<!doctype html><html lang=en><meta charset=utf-8>"
    yield "<meta name=viewport content='width=device-width'>"
    yield f"<title>{escape(title)}</title><link rel=icon href=docs/icon.svg type=image/svg+xml>"
    yield "<link rel=stylesheet href=docs/style.css><link rel=stylesheet href=docs/docs.css>"
    yield "<script type=module src=docs/docs.js></script><body class=docs>"
    yield "<header class=bar><h1 class=brand><img src=docs/icon.svg alt='' width=24 height=24>"
    yield f"{escape(title)}</h1><p><a href=./>Chat and pipeline</a> <a href=openapi.json>"
    yield "openapi.json</a></p><form class=key method=dialog><label for=key>API key</label> <input "
    yield "id=key type=password autocomplete=off placeholder='if the server wants one'></form>"
    yield "</header><div class=columns><nav aria-label=Contents><details id=contents open>"
    yield "<summary>Endpoints and types</summary>"
    for group, endpoints in groups.items():
        yield f"<h2>{group}</h2><ul>"
        for method, path, _ in endpoints:
            yield f"<li><a href='#{_anchor(method, path)}'>{_badge(method)} {escape(path)}</a></li>"
        yield "</ul>"
    yield "<h2>Types</h2><ul class=types>"
    yield from (f"<li><a href='#{escape(name)}'>{escape(name)}</a></li>" for name in schemas)
    yield "</ul></details></nav><main>"
    for group, endpoints in groups.items():
        yield f"<h2>{group}</h2>"
        for method, path, operation in endpoints:
            yield from _endpoint(method, path, operation)
    yield "<h2>Types</h2>"
    for name, schema in schemas.items():
        yield from _type(name, _object(schema))
    yield "</main></div></html>"


def _group(path: str) -> str:
    if path == "/":
        return "Web page"
    return next((group for start, group in GROUPS.items() if path.startswith(start)), "Tools")


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}-{path.strip('/') or 'page'}".replace("/", "-"))


def _badge(method: str) -> str:
    return f"<b class='method {escape(method)}'>{escape(method.upper())}</b>"


def _endpoint(method: str, path: str, operation: JsonObject) -> Iterator[str]:
    yield f"<section class=card id='{_anchor(method, path)}'><h3>{_badge(method)} "
    yield f"<code>{escape(path)}</code></h3><p>{_prose(operation, 'summary')} "
    yield f"{_prose(operation, 'description')}</p>"
    body = EXAMPLES.get(path) if method == "post" else None
    text = "" if body is None else json.dumps(body, indent=2)
    call = "curl $URL" + path + ("" if body is None else CURL.format(json.dumps(body)))
    if method == "post" and body is None:
        call = f"curl -X POST $URL{path}"
    yield f"<pre tabindex=0 class=example><code>{escape(call)}</code></pre>"
    yield f"<form class=try data-method={escape(method)} data-path='{escape(path)}'>"
    for name in PATH_PARAMETER.findall(path):
        yield f"<label>{escape(name)} <input name='{escape(name)}' required></label>"
    if body is not None:
        yield f"<label>Body<textarea name=body rows={text.count(chr(10)) + 1} spellcheck=false>"
        yield f"{escape(text)}</textarea></label>"
    yield "<div class=row><button class=main>Try it</button></div></form>"
    yield "<details><summary>Body and answers</summary><table>"
    if "requestBody" in operation:
        yield _row("body", _media(_object(operation["requestBody"])))
    for status, carrier in _object(operation["responses"]).items():
        response = _object(carrier)
        yield _row(status, f"{escape(str(response['description']))} {_media(response)}")
    yield "</table></details></section>"


CURL = " -H 'Content-Type: application/json' \\\n  -d '{}'"


def _media(carrier: JsonObject) -> str:
    kinds = _object(carrier.get("content", {}))
    shown = (f"{escape(kind)}: {_kind(_object(what)['schema'])}" for kind, what in kinds.items())
    return "<br>".join(shown)


def _type(name: str, schema: JsonObject) -> Iterator[str]:
    yield f"<section class=card id='{escape(name)}'><h3><code>{escape(name)}</code></h3>"
    yield f"<p>{_prose(schema, 'description')}</p><table>"
    required = schema.get("required", [])
    assert isinstance(required, list)
    for field, what in _object(schema.get("properties", {})).items():
        need = "required" if field in required else ""
        description = _prose(_object(what), "description")
        yield _row(escape(field), f"{_kind(what)} {need}<br>{description}")
    yield "</table></section>"


def _prose(carrier: JsonObject, name: str) -> str:
    """A text of a document, with `code` as such."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(str(carrier.get(name, ""))))


def _row(first: str, second: str) -> str:
    return f"<tr><td>{first}</td><td>{second}</td></tr>"


def _kind(schema: JsonValue) -> str:
    """A schema in few words."""
    what = _object(schema)
    if "$ref" in what:
        name = escape(str(what["$ref"]).removeprefix(PREFIX))
        return f"<a href='#{name}'>{name}</a>"
    for several in ("anyOf", "enum"):
        options = what.get(several)
        if isinstance(options, list):
            if several == "enum":
                return " or ".join(f"<code>{escape(repr(one))}</code>" for one in options)
            return " or ".join(_kind(one) for one in options)
    if what.get("type") == "array":
        return f"list of {_kind(what.get('items', {}))}"
    bounds = (f"{word} {what[word]}" for word in what if word in BOUNDS)
    return escape(" ".join((str(what.get("type", "anything")), *bounds)))


BOUNDS = ("minimum", "maximum", "maxLength", "maxItems", "pattern")


def _object(value: JsonValue) -> JsonObject:
    assert isinstance(value, dict), value
    return value

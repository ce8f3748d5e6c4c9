"""The pages of the gateway's interfaces: endpoints, errors, fields of requests, metrics.

From gateway/openapi.py, gateway/errors.py, the bodies, and what a gateway
exposes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Metric

from docs.markdown import bullets, codes, kind, page
from pipeinfer.core import REQUEST_SECONDS, STEP_TOKENS, histogram_names
from pipeinfer.gateway.anthropic import ERROR_TYPES as OF_MESSAGES
from pipeinfer.gateway.anthropic import CountRequest, MessagesRequest
from pipeinfer.gateway.errors import (
    ALTERNATIVES,
    CODES,
    IGNORED,
    ONLY_MESSAGES,
    ONLY_POOLING,
    ONLY_RESPONSES,
    REFUSED_OF,
    ApiError,
    Refusals,
)
from pipeinfer.gateway.health import ExpectedStage, Health
from pipeinfer.gateway.lora import LoadAdapterRequest
from pipeinfer.gateway.metrics import Metrics, VllmMetrics
from pipeinfer.gateway.openapi import ENDPOINTS, ERRORS, EndpointDoc
from pipeinfer.gateway.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from pipeinfer.gateway.responses_api import ResponsesRequest
from pipeinfer.gateway.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from pipeinfer.messages import Heartbeat

ENDPOINTS_SAID = """`GET /openapi.json` of a running server says the same with all types, and \
`GET /docs` shows that as a page. [Requests](requests.md) lists the fields of bodies, \
[errors](errors.md) what statuses and codes mean."""


def endpoints_page() -> str:
    """docs/reference/endpoints.md."""
    return page("Endpoints", ENDPOINTS_SAID, *(part for one in ENDPOINTS for part in _parts(one)))


def _parts(one: EndpointDoc) -> Iterator[str]:
    yield f"## {one.method.upper()} {one.path}"
    yield " ".join(filter(None, (one.summary, one.details)))
    yield bullets(_facts(one))


def _facts(one: EndpointDoc) -> Iterator[str]:
    if one.body is not None:
        yield f"Body: JSON, `{one.body.__name__}`"
    if one.answer is not None:
        yield f"Answer: JSON, `{one.answer.__name__}`"
    elif one.media != "application/json":
        yield f"Answer: `{one.media}`"
    if one.streams:
        yield "Stream: server-sent events" + (", with `stream: true`" if one.body else "")
    if one.errors or one.also:
        yield f"Other statuses: {', '.join(map(str, sorted((*one.also, *one.errors))))}"
    if one.keyed:
        yield "Needs an API key, where the server has any"


ERRORS_SAID = """An error has a status and a body:

```json
{"error": {"message": "suffix is not supported by this server", "type": "invalid_request_error", \
"param": "suffix", "code": "unsupported_parameter"}}
```

`param` names the field that is wrong, or is null. `code` is null where nothing below fits: a \
wrong method, or a prompt that has an unknown token id, that its template refuses, or that does \
not fit into the KV pool. 429 and 503 carry `Retry-After` where trying again makes sense."""


OF_MESSAGES_SAID = """`/v1/messages` has Anthropic's form, for errors of the key and of unknown \
models as well. 529 stands where other endpoints say 503. Other statuses are \
`invalid_request_error`, and from 500 on `api_error`.

```json
{"type": "error", "error": {"type": "not_found_error", \
"message": "the model 'x' does not exist; this server has 'demo'"}}
```"""


def errors_page() -> str:
    """docs/reference/errors.md."""
    statuses = (f"{status}, {_type(status)}: {said}" for status, said in ERRORS.items())
    codes = (
        f"`{code}` ({', '.join(map(str, told))}): {said}" for code, (told, said) in CODES.items()
    )
    messages = (f"{status}: `{kind}`" for status, kind in OF_MESSAGES.items())
    return page(
        "Errors",
        ERRORS_SAID,
        "## Statuses",
        bullets(statuses),
        "## Codes",
        bullets(codes),
        "## Types of /v1/messages",
        OF_MESSAGES_SAID,
        bullets(messages),
    )


def _type(status: int) -> str:
    """As ApiError says it."""
    body = json.loads(ApiError(status, "").body())
    return f"`{body['error']['type']}`"


REQUESTS_SAID = """Bodies are JSON objects. `null` is the same as not given. [The API](../api.md) \
says how answers look, and [errors](errors.md) what is said of a wrong field."""
REFUSED_SAID = """These fields change an answer in other servers and are not built. A value that \
asks for nothing is taken: `null`, and the values in brackets. Any other value gets 400 with the \
code `unsupported_parameter`. A field that only some bodies have is refused in the others."""
IGNORED_SAID = """These fields change nothing here:"""
UNKNOWN_SAID = """`/tokenize` and `/v1/messages/count_tokens` also ignore fields that say how an \
answer is chosen or shown.

Whatever stands in no list of this page, a misspelt name perhaps, is ignored as well. Such fields \
count in `pipeinfer_unknown_fields_total`, and the log names each once."""


def requests_page() -> str:
    """docs/reference/requests.md."""
    return page("Requests", REQUESTS_SAID, *_taken(), *_refused())


def _taken() -> Iterator[str]:
    shared = Generation.__struct_fields__
    yield "## Chats and completions"
    yield "`POST /v1/chat/completions` and `POST /v1/completions` both have these fields."
    yield _fields(ChatRequest, shared)
    for title, body in (("Chats alone", ChatRequest), ("Completions alone", CompletionRequest)):
        yield f"## {title}"
        yield _fields(body, (name for name in body.__struct_fields__ if name not in shared))
    yield "## Responses"
    yield "`POST /v1/responses`. " + _beside(ONLY_RESPONSES)
    yield _fields(ResponsesRequest, ResponsesRequest.__struct_fields__)
    yield "## Messages"
    yield "`POST /v1/messages`. " + _beside(ONLY_MESSAGES)
    yield _fields(MessagesRequest, MessagesRequest.__struct_fields__)
    yield "## Counting tokens of messages"
    named = codes(CountRequest.__struct_fields__)
    yield f"`POST /v1/messages/count_tokens` has of those {named}."
    yield "## Embeddings"
    yield "`POST /v1/embeddings`. " + _beside(ONLY_POOLING)
    yield _fields(EmbeddingRequest, EmbeddingRequest.__struct_fields__)
    for title, body, paths in (
        ("Scores", ScoreRequest, "`POST /score` and `/v1/score`."),
        ("Ranking", RerankRequest, "`POST /v1/rerank` and `/rerank`."),
    ):
        yield f"## {title}"
        yield f"{paths} Refuses what embeddings refuse."
        yield _fields(body, body.__struct_fields__)
    yield "## Adapters"
    yield "`POST /v1/load_lora_adapter`; of its fields `/v1/unload_lora_adapter` has `lora_name`."
    yield _fields(LoadAdapterRequest, LoadAdapterRequest.__struct_fields__)
    for path, body in (("tokenize", TokenizeRequest), ("detokenize", DetokenizeRequest)):
        yield f"## {path.capitalize()}"
        yield f"`POST /{path}`."
        yield _fields(body, body.__struct_fields__)


def _beside(refused: Refusals) -> str:
    return f"Refused beside [the others](#refused): {', '.join(_neutral(refused))}."


def _refused() -> Iterator[str]:
    yield "## Refused"
    yield REFUSED_SAID
    yield bullets(
        f"{who.replace('other', 'Other')}: {', '.join(_neutral(fields))}."
        for who, fields in REFUSED_OF.items()
    )
    yield "The error names what to ask for in place of some, the first that a body has:"
    yield bullets(f"`{name}`: {codes(others)}" for name, others in ALTERNATIVES.items())
    yield "## Ignored"
    yield IGNORED_SAID
    yield bullets(f"{why[0].upper()}{why[1:]}: {codes(names)}." for why, names in IGNORED.items())
    yield UNKNOWN_SAID


def _neutral(refused: Refusals) -> Iterator[str]:
    for name, values in refused.items():
        shown = codes(dict.fromkeys(msgspec.json.encode(value).decode() for value in values))
        yield f"`{name}` ({shown})" if shown else f"`{name}`"


def _fields(body: type[Body], names: Iterable[str]) -> str:
    schemas = _properties(body)
    return bullets(
        f"`{name}` ({kind(schemas[name])}): {schemas[name]['description']}" for name in names
    )


def _properties(body: type[Body]) -> Mapping[str, Any]:
    return msgspec.json.schema_components([body])[1][body.__name__]["properties"]


METRICS_SAID = """`GET /metrics` of the gateway shows these in Prometheus' text format, or as \
OpenMetrics to who accepts that. What is said of stages, groups, pages and queues comes from the \
latest heartbeats, and is up to half a second old. [Telemetry](../telemetry.md) says how to use \
them."""
VLLM = """With [`--vllm-metrics`](settings.md#vllm-metrics) `/metrics` has these, too. `engine` is \
the number of a group. What pipeinfer does not have, such as adapters, has no metric here."""
STAGES = ("engine", "scheduler")
STATISTICS = Path(__file__).resolve().parents[2] / "docs/reference/statistics.md"


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    return page(
        "Metrics",
        METRICS_SAID,
        bullets(_metric_lines(exposed())),
        "## Names of vLLM",
        VLLM,
        bullets(_metric_lines(of_vllm())),
    )


def exposed() -> Iterator[tuple[str, Metric]]:
    """All metrics by the name that dashboards use, sorted."""
    metrics = Metrics(_health())
    metrics.key_counters("a key")
    yield from _named(metrics.registry.collect())


def of_vllm() -> Iterator[tuple[str, Metric]]:
    """Those of --vllm-metrics."""
    metrics = VllmMetrics(_health(), "model", 1, True)
    yield from _named([*metrics.collect(), *metrics.counted.collect()])


def statistics() -> dict[str, list[str]]:
    """Names of the statistics in heartbeats, by the headings of docs/reference/statistics.md."""
    found: dict[str, list[str]] = {}
    for section in STATISTICS.read_text().split("\n## ")[1:]:
        title, _, listed = section.partition("\n")
        names = found.setdefault(title.lower(), [])
        for first, last in re.findall(r"^- `([\w.]+)`(?: to `([\w.]+)`)?", listed, re.MULTILINE):
            if last:  # all buckets of a histogram stand in one line
                name = first.partition("_le_")[0]
                bounds = STEP_TOKENS if name == "step_tokens" else REQUEST_SECONDS
                names += [one for one in histogram_names(name, bounds) if "_le_" in one]
            else:
                names.append(first)
    return found


def _named(metrics: Iterable[Metric]) -> list[tuple[str, Metric]]:
    found = {f"{one.name}_total" if one.type == "counter" else one.name: one for one in metrics}
    return sorted(found.items())


def _health() -> Health:
    health = Health([ExpectedStage(f"{name}-0", name) for name in STAGES])
    for name in STAGES:
        told = Heartbeat(
            stage=f"{name}-0",
            name=name,
            group=0,
            rank=0,
            index=0,
            pid=1,
            incarnation=1,
            state="ready",
            stats=dict.fromkeys(statistics()[name], 1.0),
        )
        health.on_heartbeat(told, 0.0)
    return health


def _metric_lines(metrics: Iterable[tuple[str, Metric]]) -> Iterator[str]:
    for name, metric in metrics:
        labels = dict.fromkeys(
            label for sample in metric.samples for label in sample.labels if label != "le"
        )
        shown = f"{name}{{{','.join(labels)}}}" if labels else name
        yield f"`{shown}` ({metric.type}): {metric.documentation}"

"""The page of the fields of requests: from the bodies and unsupported_fields.py.

Chats and completions share most fields, which stand there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from docs.markdown import bullets, codes, kind
from docs.markdown import page as page_of
from pipeinfer.gateway.anthropic import CountRequest, MessagesRequest
from pipeinfer.gateway.responses_api import ResponsesRequest
from pipeinfer.gateway.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from pipeinfer.gateway.unsupported_fields import (
    ALTERNATIVES,
    IGNORED,
    ONLY_MESSAGES,
    ONLY_RESPONSES,
    REFUSED_OF,
    Refusals,
)

INTRODUCTION = """Bodies are JSON objects. `null` is the same as not given. [The API](../api.md) \
says how answers look, and [errors](errors.md) what is said of a wrong field."""
REFUSED_SAID = """These fields change an answer in other servers and are not built. A value that \
asks for nothing is taken: `null`, and the values in brackets. Any other value gets 400 with the \
code `unsupported_parameter`. A field that only some bodies have is refused in the others."""
IGNORED_SAID = """These fields change nothing here:"""
UNKNOWN_SAID = """`/tokenize` and `/v1/messages/count_tokens` also ignore fields that say how an \
answer is chosen or shown.

Whatever stands in no list of this page, a misspelt name perhaps, is ignored as well. Such fields \
count in `pipeinfer_unknown_fields_total`, and the log names each once."""


def page() -> str:
    """docs/reference/requests.md."""
    return page_of("Requests", INTRODUCTION, *_taken(), *_refused())


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

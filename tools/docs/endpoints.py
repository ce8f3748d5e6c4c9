"""The page of all endpoints: from gateway/openapi.py.

Types of answers are only named: /openapi.json has their fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from docs.markdown import bullets
from docs.markdown import page as page_of
from pipeinfer.gateway.openapi import ENDPOINTS, EndpointDoc

INTRODUCTION = """`GET /openapi.json` of a running server says the same with all types, and \
`GET /docs` shows that as a page. [Requests](requests.md) lists the fields of bodies, \
[errors](errors.md) what statuses and codes mean."""


def page() -> str:
    """docs/reference/endpoints.md."""
    return page_of("Endpoints", INTRODUCTION, *(part for one in ENDPOINTS for part in _parts(one)))


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

"""The page /docs: what /openapi.json says, for people. It loads and runs nothing.

Knows the document only.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape

from pipeinfer.json_values import JsonObject, JsonValue

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, td:first-child { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .2rem .5rem; vertical-align: top; }
summary { cursor: pointer; padding: .3rem 0; }
:root { color-scheme: light dark; }
"""
_digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PREFIX = "#/components/schemas/"


def page(document: JsonObject) -> str:
    """All endpoints, then all types."""
    return "\n".join(_lines(document))


def _lines(document: JsonObject) -> Iterator[str]:
    info = _object(document["info"])
    title = f"{info['title']} {info['version']}"
    yield "<!doctype html><html lang=en><meta charset=utf-8>"
    yield "<meta name=viewport content='width=device-width'>"
    yield f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>"
    yield "<p>Also as <a href=/openapi.json>/openapi.json</a>.</p><h2>Endpoints</h2>"
    for path, operations in _object(document["paths"]).items():
        for method, operation in _object(operations).items():
            yield from _endpoint(f"{method.upper()} {path}", _object(operation))
    yield "<h2>Types</h2>"
    for name, schema in _object(_object(document["components"])["schemas"]).items():
        yield from _type(name, _object(schema))
    yield "</html>"


def _endpoint(title: str, operation: JsonObject) -> Iterator[str]:
    summary = escape(str(operation["summary"]))
    yield f"<details open><summary><code>{escape(title)}</code> {summary}</summary>"
    yield f"<p>{escape(str(operation.get('description', '')))}</p><table>"
    if "requestBody" in operation:
        yield _row("body", _media(_object(operation["requestBody"])))
    for status, response in _object(operation["responses"]).items():
        said = _object(response)
        yield _row(status, f"{escape(str(said['description']))} {_media(said)}")
    yield "</table></details>"


def _media(carrier: JsonObject) -> str:
    kinds = _object(carrier.get("content", {}))
    shown = (f"{escape(kind)}: {_kind(_object(what)['schema'])}" for kind, what in kinds.items())
    return "<br>".join(shown)


def _type(name: str, schema: JsonObject) -> Iterator[str]:
    said = escape(str(schema.get("description", "")))
    yield f"<h3 id={escape(name)}><code>{escape(name)}</code></h3><p>{said}</p><table>"
    required = schema.get("required", [])
    assert isinstance(required, list)
    for field, what in _object(schema.get("properties", {})).items():
        need = "required" if field in required else ""
        said = escape(str(_object(what).get("description", "")))
        yield _row(escape(field), f"{_kind(what)} {need}<br>{said}")
    yield "</table>"


def _row(first: str, second: str) -> str:
    return f"<tr><td>{first}</td><td>{second}</td></tr>"


def _kind(schema: JsonValue) -> str:
    """A schema in few words."""
    what = _object(schema)
    if "$ref" in what:
        name = escape(str(what["$ref"]).removeprefix(PREFIX))
        return f"<a href=#{name}>{name}</a>"
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

"""The page /docs: what /openapi.json says, for people, in the web page's style.

Each endpoint has an example, and is tried by page/docs.js. It loads nothing from elsewhere.

Knows the document only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape

from pipeinfer.json_values import JsonObject, JsonValue

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
    "/tokenize": {"prompt": "Once upon a time"},
    "/detokenize": {"tokens": [1, 2, 3]},
}
PLACE = re.compile(r"\{(\w+)\}")
GROUPS = {
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
    return "\n".join(_lines(document))


def _lines(document: JsonObject) -> Iterator[str]:
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
    yield "openapi.json</a></p><label class=key>API key <input id=key type=password "
    yield "autocomplete=off placeholder='if the server wants one'></label></header>"
    yield "<div class=columns><nav aria-label=Contents>"
    for group, listed in groups.items():
        yield f"<h2>{group}</h2><ul>"
        for method, path, _ in listed:
            yield f"<li><a href='#{_place(method, path)}'>{_badge(method)} {escape(path)}</a></li>"
        yield "</ul>"
    yield "<h2>Types</h2><ul class=types>"
    yield from (f"<li><a href='#{escape(name)}'>{escape(name)}</a></li>" for name in schemas)
    yield "</ul></nav><main>"
    for group, listed in groups.items():
        yield f"<h2>{group}</h2>"
        for method, path, operation in listed:
            yield from _endpoint(method, path, operation)
    yield "<h2>Types</h2>"
    for name, schema in schemas.items():
        yield from _type(name, _object(schema))
    yield "</main></div></html>"


def _group(path: str) -> str:
    if path == "/":
        return "Web page"
    return next((group for start, group in GROUPS.items() if path.startswith(start)), "Tools")


def _place(method: str, path: str) -> str:
    return escape(f"{method}-{path.strip('/') or 'page'}".replace("/", "-"))


def _badge(method: str) -> str:
    return f"<b class='method {escape(method)}'>{escape(method.upper())}</b>"


def _endpoint(method: str, path: str, operation: JsonObject) -> Iterator[str]:
    summary = escape(str(operation["summary"]))
    yield f"<section class=card id='{_place(method, path)}'><h3>{_badge(method)} "
    yield f"<code>{escape(path)}</code></h3><p>{summary} "
    yield f"{escape(str(operation.get('description', '')))}</p>"
    body = EXAMPLES.get(path) if method == "post" else None
    text = "" if body is None else json.dumps(body, indent=2)
    call = "curl $URL" + path + ("" if body is None else CURL.format(json.dumps(body)))
    if method == "post" and body is None:
        call = f"curl -X POST $URL{path}"
    yield f"<pre tabindex=0 class=example><code>{escape(call)}</code></pre>"
    yield f"<form class=try data-method={escape(method)} data-path='{escape(path)}'>"
    for name in PLACE.findall(path):
        yield f"<label>{escape(name)} <input name='{escape(name)}' required></label>"
    if body is not None:
        yield f"<label>Body<textarea name=body rows={text.count(chr(10)) + 1} spellcheck=false>"
        yield f"{escape(text)}</textarea></label>"
    yield "<div class=row><button class=main>Try it</button></div></form>"
    yield "<details><summary>Body and answers</summary><table>"
    if "requestBody" in operation:
        yield _row("body", _media(_object(operation["requestBody"])))
    for status, response in _object(operation["responses"]).items():
        said = _object(response)
        yield _row(status, f"{escape(str(said['description']))} {_media(said)}")
    yield "</table></details></section>"


CURL = " -H 'Content-Type: application/json' \\\n  -d '{}'"


def _media(carrier: JsonObject) -> str:
    kinds = _object(carrier.get("content", {}))
    shown = (f"{escape(kind)}: {_kind(_object(what)['schema'])}" for kind, what in kinds.items())
    return "<br>".join(shown)


def _type(name: str, schema: JsonObject) -> Iterator[str]:
    said = escape(str(schema.get("description", "")))
    yield f"<section class=card id='{escape(name)}'><h3><code>{escape(name)}</code></h3>"
    yield f"<p>{said}</p><table>"
    required = schema.get("required", [])
    assert isinstance(required, list)
    for field, what in _object(schema.get("properties", {})).items():
        need = "required" if field in required else ""
        said = escape(str(_object(what).get("description", "")))
        yield _row(escape(field), f"{_kind(what)} {need}<br>{said}")
    yield "</table></section>"


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

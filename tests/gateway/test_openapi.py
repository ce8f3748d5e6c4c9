"""/openapi.json says what there is: routes, bodies, answers; the examples of docs/api.md fit it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.gateway import openapi, response_types
from pipeinfer.gateway.openapi import ENDPOINTS, EndpointDoc

API = Path(__file__).parents[2] / "docs/api.md"
BY_NAME = {f"{one.method.upper()} {one.path}": one for one in ENDPOINTS}
USER = {"messages": [{"role": "user", "content": "one two"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**USER, "logprobs": True, "prompt_logprobs": 1},
    "/v1/completions": {"prompt": "one two"},
    "/v1/responses": {"input": "one two"},
    "/v1/responses/input_tokens": {"input": "one two"},
    "/v1/messages": {**USER, "max_tokens": 9},
    "/v1/messages/count_tokens": USER,
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [1]},
}
DOCUMENT = json.loads(msgspec.json.encode(openapi.document()))


def check(content: Any, kind: type) -> None:
    """Against the schema, as whoever has only the document would."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}", "components": COMPONENTS}
    jsonschema.Draft202012Validator(schema).validate(content)


COMPONENTS = DOCUMENT["components"]


def test_its_schemas_are_valid_and_every_reference_leads_somewhere() -> None:
    schemas = COMPONENTS["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert named - set(schemas) == set()
    names = [one["operationId"] for path in DOCUMENT["paths"].values() for one in path.values()]
    assert len(set(names)) == len(names) == len(ENDPOINTS)


async def test_it_has_every_route_and_no_other(gateway: Gateway) -> None:
    runner = gateway.driver._runner  # pyright: ignore[reportPrivateUsage]
    assert runner is not None
    routes: set[str] = set()
    for route in runner.app.router.routes():
        canonical = route.resource.canonical if route.resource is not None else ""
        if route.method != "HEAD" and not canonical.startswith("/{_:") and "{_" not in canonical:
            routes.add(f"{route.method} {canonical}")
    assert routes == set(BY_NAME)


async def test_a_wrong_method_is_answered_with_exactly_those_of_the_path(gateway: Gateway) -> None:
    methods: dict[str, set[str]] = {}
    for one in ENDPOINTS:
        methods.setdefault(one.path, set()).add(one.method.upper())
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for path, known in methods.items():
            answer = await client.request("TRACE", re.sub(r"{\w+}", openapi.FILES[0], path))
            assert answer.status_code == 405, path
            assert set(answer.headers["allow"].split(",")) - {"HEAD"} == known, path


@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_of_their_types_and_hold_nothing_else(
    gateway: Gateway, path: str
) -> None:
    kind = BY_NAME[f"POST {path}"].answer
    assert kind is not None
    check(BODIES[path], BY_NAME[f"POST {path}"].body or object)
    async with httpx.AsyncClient() as client:
        answer = await client.post(gateway.url + path, json=BODIES[path])
    assert answer.status_code == 200
    said = msgspec.json.decode(answer.content, type=kind)
    assert json.loads(msgspec.json.encode(said)) == answer.json()
    check(answer.json(), kind)


async def test_what_tells_how_things_are_is_of_its_type(gateway: Gateway) -> None:
    async with httpx.AsyncClient() as client:
        for one in ENDPOINTS:
            if one.method == "get" and one.answer is not None and "{id}" not in one.path:
                path = one.path.replace("{model}", "test")
                answer = await client.get(gateway.url + path)
                said = msgspec.json.decode(answer.content, type=one.answer)
                told = answer.json()
                if one.answer is response_types.TokenizerInfo:  # the checkpoint may say more
                    told = {name: told[name] for name in one.answer.__struct_fields__}
                assert json.loads(msgspec.json.encode(said)) == told, path


async def test_errors_are_of_their_types(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="secret")
    async with httpx.AsyncClient() as client:
        for one in ENDPOINTS:
            if one.keyed:
                path = one.path.replace("{model}", "test")
                answer = await client.request(one.method, gateway.url + path)
                assert answer.status_code == 401 and 401 in one.errors, path
                msgspec.json.decode(answer.content, type=one.error, strict=True)
                check(answer.json(), one.error)


def examples() -> list[tuple[str, type, Any]]:
    """(where, its type, content) of every JSON block of the page."""
    heading, found = "", []
    nth: dict[str, int] = {}
    for part in re.findall(r"^#+ [^\n]*$|^```json\n.*?^```", API.read_text(), re.M | re.S):
        if part.startswith("#"):
            heading = part.lstrip("# ")
            continue
        content = json.loads(part.removeprefix("```json\n").removesuffix("```"))
        nth[heading] = nth.get(heading, 0) + 1
        found.append((heading, kind_of(heading, nth[heading], content), content))
    return found


def kind_of(heading: str, number: int, content: Any) -> type:
    endpoint: EndpointDoc | None = BY_NAME.get(heading)
    if endpoint is None:
        if "error" in content:
            return response_types.MessageError if "type" in content else response_types.Error
        return response_types.PipelineHealth
    kind = endpoint.body if endpoint.body is not None and number % 2 else endpoint.answer
    assert kind is not None
    return kind


def test_examples_of_the_page_fit_the_document() -> None:
    found = examples()
    assert {where for where, _, _ in found} >= {f"POST {path}" for path in BODIES}
    for where, kind, content in found:
        try:
            check(content, kind)
        except jsonschema.ValidationError as error:
            pytest.fail(f"{where}: {error.message}")


def test_every_endpoint_stands_on_the_page() -> None:
    page = API.read_text()
    for one in ENDPOINTS:
        assert one.path.replace("{model}", "ID") in page


async def test_the_page_loads_nothing_and_lists_every_endpoint_and_field(gateway: Gateway) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{gateway.url}/docs")
        assert (await client.get(f"{gateway.url}/openapi.json")).json() == DOCUMENT
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for word in ("http:", "https:", "@import", "url(", "style="):
        assert word not in answer.text
    loaded = set(re.findall(r"(?:src|rel=\w+ href)=([^ >]+)", answer.text))
    assert loaded == {f"docs/{name}" for name in openapi.FILES}
    async with httpx.AsyncClient() as client:
        for name in loaded:
            assert (await client.get(f"{gateway.url}/{name}")).status_code == 200
        assert (await client.get(f"{gateway.url}/docs/main.js")).status_code == 404
    for one in ENDPOINTS:
        assert f"<code>{one.path}</code>" in answer.text
        for field in () if one.body is None else one.body.__struct_fields__:
            assert f"<td>{field}</td>" in answer.text
    links = set(re.findall(r"href='#([^']+)'", answer.text))
    assert links and all(f"<section class=card id='{name}'>" in answer.text for name in links)


def test_what_a_type_says_is_never_markup() -> None:
    schema = {"description": "<b>", "properties": {"<i>": {"type": "<u>"}}}
    info = {"title": "<s>", "version": "&"}
    made = openapi.page({"info": info, "paths": {}, "components": {"schemas": {"Type": schema}}})
    assert not any(tag in made for tag in ("<b>", "<i>", "<u>", "<s>"))

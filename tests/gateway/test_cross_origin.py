"""Web pages: what a browser asks before a request of a page, and what it then lets the page see."""

from __future__ import annotations

import aiohttp
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.settings import ConfigurationError

PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
BODY = {"prompt": "a b"}
WANTED = "authorization, content-type, x-stainless-lang"


async def preflight(gateway: Gateway, origin: str) -> aiohttp.ClientResponse:
    """What a browser sends before a POST of JSON with a key; it never sends the key."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": WANTED,
    }
    async with aiohttp.ClientSession() as browser:
        url = f"{gateway.url}/v1/completions"
        async with browser.options(url, headers=headers) as response:
            await response.read()
            return response


async def post(gateway: Gateway, origin: str, key: str = "k", **body: object):
    headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as browser:
        url = f"{gateway.url}/v1/completions"
        async with browser.post(url, headers=headers, json={**BODY, **body}) as response:
            await response.read()
            return response


def cors(response: aiohttp.ClientResponse) -> set[str]:
    return {name for name in response.headers if name.lower().startswith("access-control")}


async def test_without_the_setting_no_page_is_let_in(start_gateway: StartGateway) -> None:
    for settings in ({}, {"api_key": "k"}):
        gateway = await start_gateway(**settings)
        asked, sent = await preflight(gateway, PAGE), await post(gateway, PAGE)
        assert asked.status == (401 if settings else 405)
        assert sent.status == (200 if settings else 403), "a key is the page's own right"
        assert not cors(asked) and not cors(sent) and "Vary" not in sent.headers


async def test_an_allowed_page_may_ask_and_see_answers_and_errors(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(
        api_key="k", allowed_origins=f"{PAGE}, http://localhost:3000", key_requests_per_minute=9
    )
    asked = await preflight(gateway, PAGE)
    assert asked.status == 204
    assert asked.headers["Access-Control-Allow-Origin"] == PAGE
    assert asked.headers["Access-Control-Allow-Headers"] == WANTED
    assert "POST" in asked.headers["Access-Control-Allow-Methods"]
    for key, stream, status in (("k", False, 200), ("k", True, 200), ("wrong", False, 401)):
        sent = await post(gateway, PAGE, key, stream=stream)
        assert sent.status == status
        assert sent.headers["Access-Control-Allow-Origin"] == PAGE
        assert sent.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in sent.headers
    exposed = sent.headers["Access-Control-Expose-Headers"]
    assert {"x-request-id", "retry-after"} <= set(exposed.split(", "))
    local = await preflight(gateway, "http://localhost:3000")
    assert local.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"


@pytest.mark.parametrize("origin", [OTHER, PAGE + ".evil.org", PAGE + ":8443", "null", ""])
async def test_another_page_is_not_let_in(start_gateway: StartGateway, origin: str) -> None:
    gateway = await start_gateway(allowed_origins=PAGE)
    asked, sent = await preflight(gateway, origin), await post(gateway, origin)
    assert asked.status == 405 and not cors(asked) and not cors(sent)
    assert sent.headers["Vary"] == "Origin", "a cache must not give it to the allowed page"


async def test_a_star_lets_every_page_in(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(allowed_origins="*")
    for response in (await preflight(gateway, OTHER), await post(gateway, OTHER)):
        assert response.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize(
    "origins", ["example.org", "https://a/b", "https://a/", "https://", "*.example.org", "null"]
)
async def test_what_is_no_origin_is_a_wrong_configuration(
    start_gateway: StartGateway, origins: str
) -> None:
    with pytest.raises(ConfigurationError, match="--allowed-origins"):
        await start_gateway(allowed_origins=f"{PAGE},{origins}")

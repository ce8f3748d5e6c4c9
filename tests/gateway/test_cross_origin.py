"""Web pages: what a browser may ask, with keys and without, and what it lets the page see."""

from __future__ import annotations

import json
import logging

import aiohttp
import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient, answers

from pipeinfer.runtime import servers
from pipeinfer.settings import ConfigurationError

PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
FIELDS = {"prompt": "a b"}
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
        async with browser.post(url, headers=headers, json={**FIELDS, **body}) as response:
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


EVIL = "http://evil.example.org"
BODY = b'{"prompt": "a b"}'
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "//v1/responses", "/tokenize",
         "/detokenize", "/reset_prefix_cache", "/v1/responses/input_tokens")  # fmt: skip
READS = ("/v1/models", "/monitor/prefixes", "/monitor/events", "/monitor/requests/x")
SENT_WITHOUT_PREFLIGHT = (
    "text/plain",
    "text/plain;charset=UTF-8",
    "text/plain; application/json",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "",
)


async def ask(
    gateway: Gateway, method: str, path: str, content: bytes | None = None, **headers: str
) -> httpx.Response:
    """Headers are named as parameters can be: `content_type` is Content-Type."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient() as http:
        return await http.request(method, gateway.url + path, content=content, headers=named)


def error(response: httpx.Response) -> tuple[int, str]:
    """Its status, and what it says."""
    return response.status_code, response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_of_another_site_makes_a_server_without_keys_do_nothing(
    gateway: Gateway, path: str
) -> None:
    own = gateway.url.replace("127.0.0.1", "localhost")  # to the browser another site all the same
    for marks in (
        {"origin": EVIL, "sec_fetch_site": "cross-site"},
        {"origin": EVIL},
        {"origin": "null"},
        {"origin": own, "sec_fetch_site": "same-site"},
        {"origin": gateway.url.replace("http:", "https:") + "0"},
        {"sec_fetch_site": "cross-site"},
    ):
        for kind in ("application/json", "text/plain"):
            sent = await ask(gateway, "POST", path, BODY, content_type=kind, **marks)
            status, message = error(sent)
            assert status == 403 and "--allowed-origins" in message, (marks, message)
    assert not gateway.pipeline.submits


@pytest.mark.parametrize("path", READS)
async def test_a_page_of_another_site_is_shown_nothing(gateway: Gateway, path: str) -> None:
    for marks in ({"origin": EVIL}, {"sec_fetch_site": "cross-site"}):
        assert (await ask(gateway, "GET", path, **marks)).status_code == 403


@pytest.mark.parametrize("kind", SENT_WITHOUT_PREFLIGHT)
async def test_a_body_is_called_json_and_the_refusal_says_how(gateway: Gateway, kind: str) -> None:
    status, message = error(await ask(gateway, "POST", PATHS[1], BODY, content_type=kind))
    assert status == 415 and "Content-Type: application/json" in message
    assert not gateway.pipeline.submits


async def test_no_body_needs_no_type_whatever_a_client_calls_it(gateway: Gateway) -> None:
    """aiohttp calls it octets."""
    kind = "application/octet-stream"
    async with aiohttp.ClientSession(gateway.url) as http, http.post("/sleep?level=7") as answer:
        assert answer.request_info.headers["Content-Type"] == kind
        assert answer.status == 503, "its engine cannot sleep"
    page = await ask(gateway, "POST", "/sleep?level=7", origin=gateway.url, content_type=kind)
    assert error(page)[0] == 415


async def test_a_page_names_the_type_of_its_body_and_a_program_need_not(gateway: Gateway) -> None:
    for marks in ({"origin": gateway.url}, {"sec_fetch_site": "same-origin"}):
        assert error(await ask(gateway, "POST", PATHS[1], BODY, **marks))[0] == 415
    assert (await ask(gateway, "POST", PATHS[1], BODY)).status_code == 200
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/x+json"):
        assert (await ask(gateway, "POST", PATHS[1], BODY, content_type=kind)).status_code == 200, (
            kind
        )


async def test_the_servers_own_page_and_a_link_to_it_work(gateway: Gateway) -> None:
    json_ = "application/json"
    for marks in (
        {"origin": gateway.url, "sec_fetch_site": "same-origin"},
        {"origin": gateway.url},
        {"origin": "https://front.example.org", "sec_fetch_site": "same-origin"},  # by a proxy
        {"sec_fetch_site": "none"},
    ):
        sent = await ask(gateway, "POST", PATHS[1], BODY, content_type=json_, **marks)
        assert sent.status_code == 200, marks
        assert (await ask(gateway, "GET", "/v1/models", **marks)).status_code == 200
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    for path in ("/", "/docs"):
        assert (await ask(gateway, "GET", path, **link)).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example.org", "EVIL.example.org:8000", "evil.example.org.", "127.0.0.1.example.org",
     "localhost.example.org", "[evil.example.org]", "evil.example.org:", "a b", "127.1"],
)  # fmt: skip
async def test_a_name_of_the_web_is_not_the_servers_own(gateway: Gateway, host: str) -> None:
    for path in (*READS, "/", "/page/main.js", "/docs", "/openapi.json", "/nothing"):
        status, message = error(await ask(gateway, "GET", path, host=host))
        assert status == 403 and "--allowed-hosts" in message, path
    for path in PATHS:
        sent = await ask(gateway, "POST", path, BODY, host=host, content_type="application/json")
        assert sent.status_code == 403
    assert not gateway.pipeline.submits
    asked = {"origin": EVIL, "access_control_request_method": "POST"}
    assert (await ask(gateway, "OPTIONS", PATHS[0], host=host, **asked)).status_code == 403


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.1.2.3:8000", "[::1]", "[2001:db8::1]:8000", "localhost", "LOCALHOST:8000",
     "localhost.", "a.b.localhost:1", "gateway", "my_gateway:8000", "gateway-1:8000", ""],
)  # fmt: skip
async def test_addresses_and_names_without_a_dot_are(gateway: Gateway, host: str) -> None:
    assert (await ask(gateway, "GET", "/v1/models", host=host)).status_code == 200


async def test_probes_and_scrapes_may_use_any_name(gateway: Gateway) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version"):
        assert (await ask(gateway, "GET", path, host="lb.example.org")).status_code == 200


async def test_http_1_0_without_a_host_is_no_browser_and_a_whole_url_counts_as_one(
    gateway: Gateway,
) -> None:
    for head, expected in (
        ("GET /v1/models HTTP/1.0", 200),
        ("GET http://evil.example.org/v1/models HTTP/1.1\r\nHost: localhost", 403),
        ("GET http://127.0.0.1/v1/models HTTP/1.1\r\nHost: localhost", 200),
        ("GET http://[::1]:80/v1/models HTTP/1.1\r\nHost: localhost", 200),
    ):
        client = await RawClient.connect(gateway)
        client.send(f"{head}\r\nConnection: close\r\n\r\n".encode())
        assert answers(await client.all(60))[0][0] == expected, head
        await client.close()


@pytest.mark.parametrize(
    "line",
    [b"Host: ev\xaeil.example", b"Origin: http://ev\xaeil", b"Authorization: Bearer \xae",
     b"Content-Encoding: \xae", b"Content-Type: \xae", b"X-Request-Id: \xae"],
)  # fmt: skip
@pytest.mark.parametrize("start", [b"GET /v1/models", b"POST /v1/messages", b"GET /n\xaeone"])
async def test_a_header_that_is_no_utf_8_gets_an_answer_of_its_own(
    gateway: Gateway, start: bytes, line: bytes
) -> None:
    client = await RawClient.connect(gateway)
    host = b"" if line.startswith(b"Host") else b"Host: localhost\r\n"
    client.send(start + b" HTTP/1.1\r\n" + host + line + b"\r\nConnection: close\r\n\r\n")
    [(status, _, body)] = answers(await client.all(60))
    assert status < 500 and json.loads(body), (status, body)
    await client.close()


async def test_named_hosts_and_origins_are_let_in(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(
        allowed_hosts="llm.example.org, Other.example.org.", allowed_origins=EVIL
    )
    for host in ("llm.example.org", "LLM.example.org:8000", "other.example.org"):
        assert (await ask(gateway, "GET", "/v1/models", host=host)).status_code == 200
    assert (await ask(gateway, "GET", "/v1/models", host="a.llm.example.org")).status_code == 403
    for marks in ({"origin": EVIL}, {"origin": EVIL, "sec_fetch_site": "cross-site"}):
        sent = await ask(gateway, "POST", PATHS[1], BODY, content_type="application/json", **marks)
        assert sent.status_code == 200
        assert sent.headers["access-control-allow-origin"] == EVIL
    text = await ask(gateway, "POST", PATHS[1], BODY, content_type="text/plain", origin=EVIL)
    assert text.status_code == 415
    everybody = await start_gateway(allowed_hosts="*", allowed_origins="*")
    sent = await ask(everybody, "GET", "/v1/models", host="evil.example.org", origin="http://x.org")
    assert sent.status_code == 200


async def test_the_name_to_listen_on_is_the_servers_own(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    real = servers.open_sockets
    monkeypatch.setattr(servers, "open_sockets", lambda _, port: real("127.0.0.1", port))
    gateway = await start_gateway(host="gpu.example.org")
    gateway.driver.url = gateway.url.replace("gpu.example.org", "127.0.0.1")
    assert (await ask(gateway, "GET", "/v1/models", host="gpu.example.org:1")).status_code == 200
    assert (await ask(gateway, "GET", "/v1/models", host="evil.example.org")).status_code == 403
    assert "--allowed-hosts" in caplog.text, "whoever listens for others is told"


async def test_with_keys_the_key_protects_and_named_hosts_hold(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(api_key="k")
    key, marks = {"authorization": "Bearer k"}, {"origin": EVIL, "sec_fetch_site": "cross-site"}
    far = {"host": "any.example.org", "content_type": "text/plain"}
    assert (await ask(gateway, "POST", PATHS[1], BODY, **far, **marks)).status_code == 401
    assert (await ask(gateway, "POST", PATHS[1], BODY, **far, **marks, **key)).status_code == 200
    strict = await start_gateway(api_key="k", allowed_hosts="llm.example.org")
    for host, status in (("any.example.org", 403), ("llm.example.org", 200), ("127.0.0.1", 200)):
        assert (await ask(strict, "GET", "/v1/models", host=host, **key)).status_code == status


async def test_a_refusal_is_in_the_form_that_the_paths_clients_read(gateway: Gateway) -> None:
    refused = await ask(gateway, "POST", "/v1/messages", BODY, origin=EVIL)
    assert json.loads(refused.content)["error"]["type"] == "permission_error"


@pytest.mark.parametrize("hosts", ["http://a.org", "a.org:8000", "a.org/b", "*.example.org", "a b"])
async def test_what_is_no_name_is_a_wrong_configuration(
    start_gateway: StartGateway, hosts: str
) -> None:
    with pytest.raises(ConfigurationError, match="--allowed-hosts"):
        await start_gateway(allowed_hosts=f"good.example.org,{hosts}")

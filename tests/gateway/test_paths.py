"""Paths as clients put them together, and the small endpoints that others' servers have."""

from __future__ import annotations

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from pipeinfer.gateway.app import slash_tolerant
from pipeinfer.version import __version__

CHAT = {"model": "test", "messages": [{"role": "user", "content": "one two"}]}


@pytest.mark.parametrize("base", ["//v1", "/v1/", "//v1//", "///v1"])
async def test_several_slashes_count_as_one(gateway: Gateway, base: str) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{gateway.url}{base}/chat/completions", json=CHAT)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "one two "
        listed = await http.get(f"{gateway.url}{base}/models/test")
        assert listed.json()["id"] == "test"


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models", "//v1//chat/completions"])
async def test_no_number_of_slashes_leads_past_the_key(
    start_gateway: StartGateway, path: str
) -> None:
    gateway = await start_gateway(api_key="secret")
    async with httpx.AsyncClient() as http:
        for method in ("GET", "POST"):
            answer = await http.request(method, f"{gateway.url}{path}", json=CHAT)
            assert answer.status_code == 401, answer.text


@pytest.mark.parametrize("path", ["/v1x/models", "/v1/modelsx", "/x/v1/models", "/v1models"])
async def test_other_paths_are_still_no_paths(gateway: Gateway, path: str) -> None:
    async with httpx.AsyncClient() as http:
        assert (await http.get(gateway.url + path)).status_code == 404


def test_a_loose_route_has_its_path_in_it() -> None:
    assert slash_tolerant("/v1/chat/completions") == "/{_:/*}v1{_0:/+}chat{_1:/+}completions"


async def test_version_ping_and_what_no_model_can(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.get("/version")).json() == {"version": __version__}
        assert (await http.get("/ping")).status_code == 200
        assert (await http.post("/ping")).status_code == 200
        refused = await http.post("/v1/embeddings", json={"model": "test", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "not_implemented")


async def test_metrics_come_as_openmetrics_to_who_accepts_it(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        plain = await http.get("/metrics")
        wanted = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"}
        open_metrics = await http.get("/metrics", headers=wanted)
    assert plain.headers["content-type"].startswith("text/plain")
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    found = {family.name: family for family in text_string_to_metric_families(open_metrics.text)}
    stop = [s for s in found["pipeinfer_requests"].samples if s.labels == {"outcome": "stop"}]
    assert ("pipeinfer_requests_total", 1.0) in [(s.name, s.value) for s in stop]

"""/reset_prefix_cache answers when all groups have, and belongs to those who have a key."""

from __future__ import annotations

import httpx
import pytest
from gateway_pipeline import StartGateway

from pipeinfer.gateway import sessions


async def reset(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{url}/reset_prefix_cache", headers=headers)


async def test_it_is_200_and_empty_when_the_group_has_answered(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="secret")
    assert (await reset(gateway.url)).status_code == 401
    answer = await reset(gateway.url, authorization="Bearer secret")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_group_that_does_not_answer_is_named(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "RESET_TIMEOUT", 0.05)
    gateway = await start_gateway()
    gateway.pipeline.resets = [1]  # another than the one that there is
    answer = await reset(gateway.url)
    assert answer.status_code == 503 and "groups [0]" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "reset_unanswered"

"""A page that looks does not keep a gateway from leaving: its feed ends, and in good order."""

from __future__ import annotations

import asyncio

import httpx
from gateway_pipeline import Gateway

DRAIN = 300.0  # seconds that a gateway would wait for a request that runs
SOON = 60.0


async def test_a_feed_ends_when_its_gateway_leaves(gateway: Gateway) -> None:
    async with (
        httpx.AsyncClient(timeout=SOON) as client,
        client.stream("GET", f"{gateway.url}/monitor/events") as feed,
    ):
        lines = feed.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        await asyncio.wait_for(gateway.driver.leave(DRAIN), SOON)
        async for _ in lines:  # to its end; a connection that breaks raises
            pass

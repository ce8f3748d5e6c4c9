"""A gateway that hands its sockets over: nobody finds a connection dead that seemed to live."""

from __future__ import annotations

import asyncio

import httpx
from gateway_pipeline import Gateway

from pipeinfer.messages import TextRow
from pipeinfer.wire import pack

BODY = {"prompt": "one two"}


async def test_a_kept_connection_is_told_that_it_ends_and_an_idle_one_is_closed(
    gateway: Gateway,
) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as kept, httpx.AsyncClient() as idle:
        assert (await idle.get(f"{gateway.url}/health")).status_code == 200
        before = await kept.post("/v1/completions", json=BODY)
        assert "connection" not in before.headers
        leaving = asyncio.create_task(gateway.driver.leave(60))
        await asyncio.sleep(0)  # it has begun
        answered = await kept.post("/v1/completions", json=BODY)
        assert answered.status_code == 200
        assert answered.headers["connection"] == "close"
        await asyncio.wait_for(leaving, 30)


async def test_what_runs_is_finished_however_long_nothing_comes(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        body = {"prompt": "hang"}
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        while not gateway.pipeline.submits:
            await asyncio.sleep(0.005)
        leaving = asyncio.create_task(gateway.driver.leave(60))
        await asyncio.wait({leaving}, timeout=2.5)  # longer than an idle gateway waits
        assert not leaving.done() and not answer.done()
        [submit] = gateway.pipeline.submits
        ended = TextRow(
            submit.request_id, submit.attempt, "late", 0, 0, pack([1]), "length", output_tokens=1
        )
        gateway.pipeline.rows(ended)
        assert (await answer).json()["choices"][0]["text"] == "late"
        await asyncio.wait_for(leaving, 30)

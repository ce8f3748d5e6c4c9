"""Clients that ask before they send a body (Expect: 100-continue): told to, or refused, in time."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODY = json.dumps({"prompt": ""}).encode()  # refused as a request, once it was read


def head(length: int, *headers: str, expect: str = "100-continue") -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {length}",
             f"Expect: {expect}", *headers]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


async def answer(client: RawClient) -> bytes:
    """The next response's head, an interim one's too."""
    return await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 10)


async def test_client_is_told_to_send_what_is_wanted(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway)
    client.send(head(len(BODY)))
    assert await answer(client) == CONTINUE
    client.send(BODY)
    assert (await answer(client)).startswith(b"HTTP/1.1 400 "), "the body was read"
    await client.close()


REFUSED = {
    "wrong key": ({"api_key": "s3cret"}, head(len(BODY), "Authorization: Bearer other"), 401),
    "too large": ({"max_body_mib": 1}, head(2**20 + 1), 413),
    "unknown coding": ({}, head(len(BODY), "Content-Encoding: br"), 415),
    "unknown wish": ({}, head(len(BODY), expect="the-moon"), 417),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_client_is_not_told_to_send_what_nobody_reads(
    start_gateway: StartGateway, why: str
) -> None:
    settings, request, status = REFUSED[why]
    client = await RawClient.connect(await start_gateway(**settings))
    client.send(request)
    assert (await answer(client)).startswith(f"HTTP/1.1 {status} ".encode())
    await client.close()


async def test_limit_is_looked_at_before_the_body(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="k", key_requests_per_minute=1)
    key = "Authorization: Bearer k"
    first, second = await RawClient.connect(gateway), await RawClient.connect(gateway)
    first.send(head(len(BODY), key))
    assert await answer(first) == CONTINUE
    second.send(head(len(BODY), key))
    assert (await answer(second)).startswith(b"HTTP/1.1 429 ")
    await first.close()
    await second.close()

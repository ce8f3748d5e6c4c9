"""Clients that stop sending get their answers, and clients that are gone are noticed at once."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from gateway_pipeline import Gateway
from raw_http import RawClient, answers, post

from pipeinfer.messages import TextRow
from pipeinfer.wire import pack
from waiting import until

AT_ONCE = 0.8  # seconds: less than the next probe would take


def finish(gateway: Gateway, text: str, offset: int = 0) -> None:
    """Ends the last request with `text`."""
    name = gateway.pipeline.submits[-1].request_id
    at = 1 if offset else 0
    gateway.pipeline.rows(TextRow(name, 1, text, offset, at, pack([1]), "stop", None, at + 1))


async def begin(gateway: Gateway, prompt: str, stream: bool, version: str = "1.1") -> RawClient:
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": prompt, "stream": stream}, version=version))
    return client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_client_gets_its_whole_answer(gateway: Gateway, stream: bool) -> None:
    """Also if what it asked for waits long enough to be probed several times."""
    client = await begin(gateway, "hang", stream)
    client.half_close()
    await until(lambda: gateway.pipeline.submits)
    await asyncio.sleep(1.3)  # more than one probe
    assert not gateway.core.idle(), "it is not taken for gone"
    finish(gateway, "late")
    [(status, headers, body)] = answers(await client.all())
    assert status == 200
    if stream:
        assert body.endswith(b"data: [DONE]\n\n") and b'"late"' in body
    else:
        assert json.loads(body)["choices"][0]["text"] == "late"
        assert headers["connection"] == "close"
    await client.close()


async def test_a_stream_goes_on_for_a_client_that_half_closes_in_its_middle(
    gateway: Gateway,
) -> None:
    client = await begin(gateway, "pause here", stream=True)
    begun = await client.reader.readuntil(b"pause ")
    client.half_close()
    await asyncio.sleep(1.3)
    assert not gateway.core.idle()
    finish(gateway, "here ", len("pause "))
    [(_, _, body)] = answers(begun + await client.all())
    events = body.decode().split("\n\n")
    assert events.count(":") >= 2, "comments, which tell whether it is there"
    texts = [json.loads(e[6:])["choices"][0]["text"] for e in events if e.startswith("data: {")]
    assert texts == ["pause ", "here "] and events[-2] == "data: [DONE]"
    await client.close()


async def test_all_that_was_pipelined_before_the_end_is_answered(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway)
    requests = [post({"prompt": word}) for word in ("one", "two", "three")]
    client.send(b"".join(requests) + b"POST /v1/comp")
    client.half_close()
    found = answers(await client.all())
    assert [json.loads(body)["choices"][0]["text"] for _, _, body in found] == [
        "one ", "two ", "three ",
    ]  # fmt: skip
    assert [headers.get("connection") for _, headers, _ in found] == [None, None, "close"]
    await client.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hang", "pause here"])
@pytest.mark.parametrize("later", [False, True])
async def test_a_client_that_is_gone_is_hung_up_at_once(
    gateway: Gateway, prompt: str, stream: bool, later: bool
) -> None:
    """Waiting or running; also one that half-closed long before, which then sends no sign."""
    client = await begin(gateway, prompt, stream)
    await until(lambda: gateway.pipeline.submits)
    if stream and prompt != "hang":
        await client.reader.readuntil(b"pause ")
    if later:
        client.half_close()
        await asyncio.sleep(0.3)
        assert not gateway.core.idle()
    left = time.monotonic()
    await client.close()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 10)
    # One that half-closed before is known to be gone at the next probe, one a second.
    assert time.monotonic() - left < (1.0 if later else 0) + AT_ONCE
    assert gateway.core.idle()


async def test_an_unfinished_request_ends_with_its_client(gateway: Gateway) -> None:
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "hang"})[:-3])
    await asyncio.sleep(0.05)
    client.half_close()
    assert await client.all(AT_ONCE) == b""
    assert not gateway.pipeline.submits


async def test_the_end_of_an_http_1_0_client_is_its_end(gateway: Gateway) -> None:
    """Nothing could tell it from one that is gone, before there is an answer."""
    client = await begin(gateway, "hang", stream=False, version="1.0")
    await until(lambda: gateway.pipeline.submits)
    client.half_close()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), AT_ONCE)
    assert await client.all() == b""


async def test_no_probe_reaches_a_client_that_goes_on_sending(gateway: Gateway) -> None:
    client = await begin(gateway, "hang", stream=False)
    await until(lambda: gateway.pipeline.submits)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.reader.read(1), 0.3)
    finish(gateway, "x")
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    await client.close()

"""What a client sends that is no good request: answered, counted, one line in the log, no more."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import time
import tracemalloc
import zlib
from typing import Any

import httpx
import pytest
from aiohttp import web
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient, answers, post

from pipeinfer.gateway import connections, serving
from pipeinfer.gateway.response_encoders import EventStream
from pipeinfer.messages import TextRow
from pipeinfer.wire import pack
from waiting import until

GOOD = json.dumps({"prompt": "a b"}).encode()
MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "words": b"hello there\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\x00\r\n\r\n",
    "header name": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization s3cret\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: s3cret" + b"y" * 20_000,
    "many headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 1000 + b"\r\n",
    "length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "smuggling": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}  # fmt: skip
BROKEN = {
    "gzip, no such": ("gzip", b"this is no gzip"),
    "gzip, cut": ("gzip", gzip.compress(GOOD)[:-4]),
    "gzip, checksum": ("gzip", gzip.compress(GOOD)[:-8] + b"\0" * 8),
    "gzip, more": ("gzip", gzip.compress(GOOD) + b"more"),
    "deflate, no such": ("deflate", b"\xff\xff\xff\xff"),
    "deflate, cut": ("deflate", zlib.compress(GOOD)[:-4]),
    "deflate, empty": ("deflate", b""),
}


async def metric(gateway: Gateway, name: str) -> float:
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{gateway.url}/metrics")).text
    return float(re.findall(rf"^pipeinfer_{name} (\S+)$", text, re.MULTILINE)[0])


async def longest_pause(until_done: asyncio.Task[object]) -> float:
    """Of the event loop, until the task is done: seconds of processor time in one iteration,
    which do not depend on what else the machine does."""
    worst, last = 0.0, time.thread_time()
    while not until_done.done():
        await asyncio.sleep(0)
        worst, last = max(worst, time.thread_time() - last), time.thread_time()
    return worst


def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing above INFO and no traceback was logged."""
    loud = [r for r in caplog.records if r.levelno > logging.INFO or r.exc_info]
    assert not loud, [record.getMessage() for record in loud]


@pytest.mark.parametrize("request_", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_request_is_a_400_in_json_one_line_and_counted(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    caplog.set_level(logging.INFO)
    client = await RawClient.connect(gateway)
    client.send(request_)
    data = await client.all()
    [(status, headers, body)] = answers(data)
    assert status == 400 and headers["content-type"].startswith("application/json")
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("bad_request", "invalid_request_error")
    assert "server" not in headers and headers.get("connection", "close") == "close"
    lines = [r.getMessage() for r in caplog.records if "bad request" in r.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0]
    assert b"s3cret" not in data and "s3cret" not in caplog.text
    quiet(caplog)
    assert await metric(gateway, "bad_requests_total") == 1
    await client.close()


@pytest.mark.parametrize(("encoding", "body"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_compressed_body_is_a_400(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, encoding: str, body: bytes
) -> None:
    caplog.set_level(logging.INFO)
    async with httpx.AsyncClient() as http:
        url, headers = f"{gateway.url}/v1/completions", {"content-encoding": encoding}
        response = await http.post(url, content=body, headers=headers)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "invalid_body"
        assert (await http.get(f"{gateway.url}/health")).status_code == 200
    quiet(caplog)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(GOOD)),
        ("x-gzip", gzip.compress(GOOD)),
        ("GZIP", gzip.compress(GOOD)),
        ("deflate", zlib.compress(GOOD)),
        ("deflate", zlib.compress(GOOD)[2:-4]),  # bare, as some clients send it
        ("identity", GOOD),
    ],
    ids=["gzip", "x-gzip", "GZIP", "deflate", "bare deflate", "identity"],
)
async def test_a_compressed_body_is_read(gateway: Gateway, encoding: str, body: bytes) -> None:
    async with httpx.AsyncClient() as http:
        url, headers = f"{gateway.url}/v1/completions", {"content-encoding": encoding}
        response = await http.post(url, content=body, headers=headers)
        assert response.json()["choices"][0]["text"] == "a b "
        other = await http.post(url, content=body, headers={"content-encoding": "br"})
        assert other.status_code == 415
        assert other.json()["error"]["code"] == "unsupported_encoding"


async def test_every_size_of_a_compressed_body_is_read_whole(gateway: Gateway) -> None:
    """Around the size of the slices in which it is decompressed."""
    async with httpx.AsyncClient() as http:
        for size in (
            serving.DECOMPRESSED_AT_ONCE - 20,
            *range(serving.DECOMPRESSED_AT_ONCE - 2, serving.DECOMPRESSED_AT_ONCE + 3),
            10**6,
        ):
            text = GOOD + b" " * (size - len(GOOD))
            for encoding, body in (
                ("gzip", gzip.compress(text)),
                ("deflate", zlib.compress(text)[2:-4]),
            ):
                headers = {"content-encoding": encoding}
                url = f"{gateway.url}/v1/completions"
                response = await http.post(url, content=body, headers=headers)
                assert response.status_code == 200, (size, encoding)


@pytest.mark.parametrize("key", ["none", "wrong"])
async def test_a_bomb_is_refused_without_being_unpacked_and_nobody_waits_for_it(
    start_gateway: StartGateway, key: str
) -> None:
    """2 MB that are 2 GB: with a right key 413, with a wrong one 401."""
    settings = {"api_key": "s3cret"} if key == "wrong" else {}
    gateway = await start_gateway(max_body_mib=8, **settings)
    layer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = layer.compress(b" " * 2**24) + layer.flush(zlib.Z_FULL_FLUSH)
    repeated = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = repeated.compress(b" " * 2**24) + repeated.flush(zlib.Z_FULL_FLUSH)
    bomb = piece + block * 127
    assert len(bomb) < 3 * 2**20
    headers = {"content-encoding": "gzip", "authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=30) as http:
        url = f"{gateway.url}/v1/completions"
        tracemalloc.start()
        task = asyncio.create_task(http.post(url, content=bomb, headers=headers))
        pause = await longest_pause(task)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        response = await task
    assert response.status_code == (401 if key == "wrong" else 413)
    assert peak < 48 * 2**20, f"{peak >> 20} MiB"
    assert pause < 0.2, f"the loop stood for {pause:.3f} s"


async def test_malformed_chunks_are_a_400_also_of_a_body_that_nobody_wanted(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway = await start_gateway(api_key="k")
    for key, expected in (("k", 400), ("wrong", 401)):
        client = await RawClient.connect(gateway)
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
            b"Authorization: Bearer " + key.encode() + b'\r\n\r\n5\r\n{"pro\r\n'
        )
        begun = await client.reader.readuntil(b"\r\n\r\n") if expected == 401 else b""
        await asyncio.sleep(0.05)
        client.send(b"nonsense\r\n")
        found = answers(begun + await client.all(60))
        assert found[0][0] == expected
        await client.close()
    quiet(caplog)


async def test_a_declared_length_beyond_the_bound_is_refused_before_a_byte_comes(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(max_body_mib=1)
    client = await RawClient.connect(gateway)
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1048577\r\n\r\n")
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 413 ")
    await client.close()


async def test_one_byte_at_a_time_is_not_enough_for_ever(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "READ_TIMEOUT", 0.3)
    monkeypatch.setattr(serving, "BODY_TIMEOUT", 1.0)
    gateway = await start_gateway()
    body = post({"prompt": "a " * 50})

    async def refused(dripping: bytes) -> tuple[float, str]:
        """(seconds until the error came, what it says) of a client that sends these bytes last, one
        by one."""
        client, started = await RawClient.connect(gateway), time.monotonic()
        client.send(body[:-40])

        async def drip() -> None:
            for byte in dripping:
                await asyncio.sleep(0.1)
                client.send(bytes([byte]))

        dripper = asyncio.create_task(drip())
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 408 "), head
        seconds = time.monotonic() - started
        error = await asyncio.wait_for(client.reader.readuntil(b"}}"), 60)
        dripper.cancel()
        await client.close()
        return seconds, json.loads(error)["error"]["message"]

    none, slow = "no byte of the body came for 0.3 s", "the whole body did not come within 1 s"
    seconds, message = await refused(b"")
    assert seconds > 0.25 and message == none
    for _ in range(20):  # until the machine lets it drip all the while
        seconds, message = await refused(body[-40:])
        if message != none:
            break
    assert seconds > 0.9 and message == slow


async def test_heads_that_do_not_end_and_idle_connections_are_closed(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0.3)
    monkeypatch.setattr(connections, "SWEEP_INTERVAL", 0.05)
    gateway = await start_gateway()
    fresh, begun, kept, hanging = [await RawClient.connect(gateway) for _ in range(4)]
    hanging.send(post({"prompt": "hang"}))
    kept.send(post({"prompt": "a"}))
    await kept.reader.readuntil(b"}}}")
    begun.send(b"GET /health HTTP/1.1\r\nHo")
    await begun.all()
    waiting = [asyncio.create_task(client.all()) for client in (fresh, kept)]
    await asyncio.sleep(0.2)  # some sweeps
    assert not any(task.done() for task in waiting), "these have their time"
    monkeypatch.setattr(connections, "KEEP_ALIVE_TIMEOUT", 0.3)
    await asyncio.gather(*waiting)
    assert not gateway.core.idle(), "one with a request stays, however long it takes"
    for client in (fresh, begun, kept, hanging):
        await client.close()


async def test_beyond_the_bound_idle_connections_make_room_and_busy_ones_do_not(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.gateway.stage.connection_limit", lambda: 4)
    gateway = await start_gateway()
    used = await RawClient.connect(gateway)
    used.send(post({"prompt": "a"}))
    await used.reader.readuntil(b"}}}")
    idle = [await RawClient.connect(gateway) for _ in range(3)]
    await asyncio.sleep(0.05)
    busy = []
    for i in range(4):  # each takes an idle one's place: first those that never asked
        busy.append(await RawClient.connect(gateway))
        busy[-1].send(post({"prompt": "hang"}))
        await until(lambda: len(gateway.pipeline.submits) == 2 + i)  # noqa: B023
    for client in (*idle, used):
        assert await client.all(60) == b""
    refused = await RawClient.connect(gateway)
    [(status, headers, body)] = answers(await refused.all(60))
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert len(gateway.pipeline.gone) == 0, "those with a request are not touched"
    await busy.pop().close()
    await until(lambda: gateway.pipeline.gone)
    assert await metric(gateway, "refused_connections_total") == 5
    for client in busy:
        await client.close()


async def test_together_large_bodies_are_bounded_and_small_ones_pass(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_BUFFERED", 2**21)
    taken, fill = list[serving.BodyReader](), serving.BodyReader._fill

    async def noted(self: serving.BodyReader, *args: Any) -> None:
        taken.append(self)
        await fill(self, *args)

    monkeypatch.setattr(serving.BodyReader, "_fill", noted)
    gateway = await start_gateway(max_body_mib=1)
    whole = post({"prompt": "a " + " " * (2**20 - 100)})
    held = [await RawClient.connect(gateway) for _ in range(2)]
    for client in held:
        client.send(whole[:-1])
    read = len(whole.partition(b"\r\n\r\n")[2]) - 1 - serving.SMALL_BODY
    await until(lambda: taken and taken[0]._buffered == 2 * read)
    third = await RawClient.connect(gateway)
    third.send(whole)
    head = await asyncio.wait_for(third.reader.readuntil(b"\r\n\r\n"), 60)
    await third.close()
    assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in head
    small = await gateway.client().completions.create(model="test", prompt="a b")
    assert small.choices[0].text == "a b "
    held[0].send(whole[-1:])
    head = await asyncio.wait_for(held[0].reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 200 ")
    async with httpx.AsyncClient() as http:  # its room is free again
        url = f"{gateway.url}/v1/completions"
        body = {"prompt": "a " + " " * (2**20 - 100)}
        assert (await http.post(url, json=body)).status_code == 200
    for client in held:
        await client.close()


async def test_no_response_says_what_software_it_is_from(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(api_key="k")
    authorized = {"authorization": "Bearer k"}
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for method, path, headers, body in (
            ("GET", "/health", {}, None),
            ("GET", "/metrics", {}, None),
            ("GET", "/nothing", {}, None),
            ("OPTIONS", "/v1/completions", authorized, None),
            ("POST", "/v1/completions", {}, GOOD),
            ("POST", "/v1/completions", authorized, GOOD),
            ("POST", "/v1/completions", authorized, b'{"prompt": "a b", "stream": true}'),
            ("POST", "/v1/completions", authorized, b"{"),
            ("POST", "/v1/completions", {**authorized, "expect": "miracles"}, GOOD),
        ):
            response = await http.request(method, path, headers=headers, content=body)
            assert "server" not in response.headers, (method, path, response.status_code)
            if response.status_code >= 400:
                assert set(response.json()) == {"error"}


async def test_a_client_that_leaves_just_before_its_stream_begins_is_no_error_in_the_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    asked, really = [], EventStream.respond

    async def respond(stream: EventStream, request: web.Request) -> web.StreamResponse:
        asked.append(request.transport)
        return await really(stream, request)

    monkeypatch.setattr(EventStream, "respond", respond)
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "hang", "stream": True}))
    await until(lambda: asked and gateway.pipeline.submits)
    [submit] = gateway.pipeline.submits
    # In one iteration of the loop: the handler goes on before anybody hears that the client left.
    gateway.pipeline.rows(TextRow(submit.request_id, submit.attempt, "a", 0, 0, pack([1])))
    asked[0].abort()
    await until(lambda: gateway.pipeline.gone)
    await client.close()
    quiet(caplog)


async def test_the_request_behind_a_body_that_was_refused_is_read(
    start_gateway: StartGateway,
) -> None:
    """Its head comes with the end of that body, and its own body later."""
    gateway = await start_gateway(max_body_mib=1)
    client = await RawClient.connect(gateway)
    head, end, body = post({"prompt": "a b"}, "Connection: close").partition(b"\r\n\r\n")
    client.send(post({"prompt": "x" * 2**20}) + head + end)
    assert b"413" in await client.reader.readuntil(b"}}")
    await asyncio.sleep(0.1)
    client.send(body)
    [(status, _, answer)] = answers(await client.all())
    assert status == 200 and json.loads(answer)["choices"][0]["text"] == "a b "

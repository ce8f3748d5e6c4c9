"""Connections that end or are half closed: what is left of them, and who is still answered."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
import ssl
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from aiohttp import web
from gateway_pipeline import Gateway, StartGateway
from raw_http import RawClient, answers, post

import servers
from certificates import make
from pipeinfer.gateway.connections import Connection, has_more_than_its_share
from pipeinfer.messages import TextRow
from pipeinfer.wire import pack
from waiting import until

MOST = 5 * 2**20  # bytes
ENDED = 3_000  # connections; garbage of so many was 13 MiB
AT_ONCE = 8


def private(pid: int) -> int:
    """Bytes of memory that the process shares with nobody."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) << 10 for size in re.findall(r"^Private_\w+: +(\d+) kB", rollup, re.M))


async def connections(url: str, many: int) -> None:
    """One request on each."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    content = head + b'Content-Length: 15\r\n\r\n{"messages": 1}'

    async def loop() -> None:
        for _ in range(many // AT_ONCE):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(content)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    await asyncio.gather(*(loop() for _ in range(AT_ONCE)))


def test_connections_that_ended_take_no_memory():
    with servers.Server("--threads", "1", "--flight-recorder-mib", "0") as server:
        asyncio.run(connections(server.url, 400))
        pid = server.pid("gateway")
        before = private(pid)
        asyncio.run(connections(server.url, ENDED))
        grown = private(pid) - before
    assert grown < MOST, f"{grown / 2**20:.1f} MiB"


async def test_a_client_that_leaves_just_before_the_first_chunk_counts_as_gone(gateway: Gateway):
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "hang up", "stream": true, "max_tokens": 3}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    async with asyncio.timeout(20):
        while not gateway.pipeline.submits:
            await asyncio.sleep(0.01)
        [submit] = gateway.pipeline.submits
        assert gateway.driver._connections is not None
        [connection] = gateway.driver._connections._all
        assert connection.transport is not None
        gateway.pipeline.rows(TextRow(submit.request_id, submit.attempt, "a", 0, 0, pack([7])))
        connection.transport.abort()  # both within one iteration of the loop
        aborted = await gateway.pipeline.aborts.get()
        while gateway.driver._in_flight:
            await asyncio.sleep(0.01)
    writer.close()
    assert aborted.request_id == submit.request_id
    counted = gateway.driver._context.metrics.exposition("")[0].decode()
    assert 'key_requests_total{key="anonymous",outcome="abort"} 1.0' in counted
    assert 'key_requests_total{key="anonymous",outcome="ok"} 0.0' in counted


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What forms a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def connections_in_memory() -> int:
    return sum(isinstance(one, Connection) for one in gc.get_objects())


async def asked(gateway: Gateway, content: bytes, end: str, **options: object) -> None:
    """Asks once. "read": until the server closes; "close": then the client does; "leave", "reset":
    the client goes away while its request is in the pipeline."""
    client = await RawClient.connect(gateway, **options)
    client.send(content)
    if end == "read":
        assert (await client.all()).startswith(b"HTTP/1.")
    elif end == "close":
        assert (await client.reader.read(1000)).startswith(b"HTTP/1.1 200 OK")
    else:
        await until(lambda: gateway.pipeline.submits)
    if end == "reset":
        client.writer.transport.abort()
    await client.close()


CLOSE = "Connection: close"


@pytest.mark.parametrize(
    ("content", "end"),
    [
        (post({"prompt": "a b"}, CLOSE), "read"),
        (post({"prompt": "a b"}), "close"),
        (post({"prompt": "a b", "stream": True}, CLOSE), "read"),
        (post({"prompt": "a b"}, CLOSE, "Expect: 100-continue"), "read"),
        (post({"prompt": 1}, CLOSE), "read"),
        (post({"prompt": "refuse"}, CLOSE), "read"),
        (post({"prompt": "refuse", "stream": True}, CLOSE), "read"),
        (b"GET nothing\r\n\r\n", "read"),
        (post({"prompt": "hang up"}), "leave"),
        (post({"prompt": "hang up", "stream": True}), "reset"),
        (post({"prompt": "pause here", "stream": True}), "leave"),
        (post({"prompt": "pause here", "stream": True}), "reset"),
    ],
)
async def test_a_connection_that_ended_is_gone_without_the_garbage_collector(
    gateway: Gateway, uncollected: None, content: bytes, end: str
):
    before = connections_in_memory()
    await asked(gateway, content, end)
    await until(lambda: connections_in_memory() == before)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
@pytest.mark.parametrize(
    ("content", "end"),
    [
        (post({"prompt": "a b"}, CLOSE), "read"),
        (post({"prompt": "a b", "stream": True}), "close"),
        (post({"prompt": "hang up", "stream": True}), "reset"),
    ],
)
async def test_so_is_one_that_spoke_tls(
    start_gateway: StartGateway, tmp_path: Path, uncollected: None, content: bytes, end: str
):
    cert, key = make(tmp_path, "gateway")
    gateway = await start_gateway(tls_cert=cert, tls_key=key)
    before = connections_in_memory()
    trusting = ssl.create_default_context(cafile=cert)
    await asked(gateway, content, end, ssl=trusting)
    await until(lambda: connections_in_memory() == before)


@pytest.fixture
def late_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is noticed in a test's time is noticed without them."""
    monkeypatch.setattr("pipeinfer.gateway.connections.CHECK_DELAYS", (0.01, 600.0))


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
    for _ in range(2):  # comments, which tell whether it is there
        begun += await client.reader.readuntil(b"\n:\n\n")
    assert not gateway.core.idle()
    finish(gateway, "here ", len("pause "))
    [(_, _, body)] = answers(begun + await client.all())
    events = body.decode().split("\n\n")
    assert events.count(":") >= 2
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
    gateway: Gateway, request: pytest.FixtureRequest, prompt: str, stream: bool, later: bool
) -> None:
    """Waiting or running; also one that half-closed long before, which then sends no sign: that it
    is gone is known at the next probe."""
    if not later:
        request.getfixturevalue("late_probes")
    client = await begin(gateway, prompt, stream)
    await until(lambda: gateway.pipeline.submits)
    if stream and prompt != "hang":
        await client.reader.readuntil(b"pause ")
    if later:
        client.half_close()
        await asyncio.sleep(0.3)
        assert not gateway.core.idle()
    await client.close()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert gateway.core.idle()


@pytest.mark.usefixtures("late_probes")
async def test_an_unfinished_request_ends_with_its_client(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.gateway.serving.READ_TIMEOUT", 600.0)
    client = await RawClient.connect(gateway)
    client.send(post({"prompt": "hang"})[:-3])
    await asyncio.sleep(0.05)
    client.half_close()
    assert await client.all() == b""
    assert not gateway.pipeline.submits


@pytest.mark.usefixtures("late_probes")
async def test_the_end_of_an_http_1_0_client_is_its_end(gateway: Gateway) -> None:
    """Nothing could tell it from one that is gone, before there is an answer."""
    client = await begin(gateway, "hang", stream=False, version="1.0")
    await until(lambda: gateway.pipeline.submits)
    client.half_close()
    await asyncio.wait_for(gateway.pipeline.aborts.get(), 60)
    assert await client.all() == b""


async def test_no_probe_reaches_a_client_that_goes_on_sending(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.gateway.connections.CHECK_DELAYS", (0.01,))
    client = await begin(gateway, "hang", stream=False)
    await until(lambda: gateway.pipeline.submits)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.reader.read(1), 0.3)
    finish(gateway, "x")
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    await client.close()


@pytest.mark.parametrize("name", ["_messages", "_current_request", "_loop"])
async def test_the_protocol_has_the_attribute(name: str) -> None:
    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    server = web.Server(answer)
    assert hasattr(server(), name), f"aiohttp {version('aiohttp')} has no RequestHandler.{name}"


@pytest.mark.parametrize(
    ("own", "others", "leaves"),
    [
        (0, [], False),
        (1_000, [], False),
        (4, [0], False),
        (9, [0], True),
        (30, [30, 30], False),
        (40, [30, 30], True),
        (10, [0, 30], False),
    ],
)
def test_new_connections_are_left_to_gateways_that_have_fewer(own, others, leaves):
    assert has_more_than_its_share(own, others) is leaves

"""Gateways that share a port: what one of them keeps, its owner gets of any."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from hashlib import sha256
from typing import Any

import aiohttp
import pytest
from leftovers import left_after
from test_outlived_gateway import begun, data, more, whole
from test_resumable_answers import PROMPT, last_id

from held_processes import HeldProcesses
from servers import Server

KEYS = ("alice", "bob")
GATEWAYS = ("gateway-0", "gateway-1", "gateway-2")
PATH = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "messages": PROMPT, "max_tokens": 300, "temperature": 0.8, "seed": 7, "ignore_eos": True,
    "stream": True,
}  # fmt: skip
ENDLESS = {"input": "What are the stages?", "background": True, "max_output_tokens": 1900,
           "ignore_eos": True}  # fmt: skip
REATTACH = 120.0  # seconds
# Seconds in which all is forgotten; fewer than those for which an answer waits for its client.
FORGOTTEN = 60.0
Connect = Callable[..., aiohttp.ClientSession]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("siblings") / "keys"
    keys.write_text("\n".join(f"{k} sha256:{sha256(k.encode()).hexdigest()}" for k in KEYS))
    numbers = ("--gateways", "3", "--detokenizers", "2", "--kv-pages", "600")
    store = ("--store", str(keys.with_name("store")))
    with Server(
        *numbers, *store, "--api-key-file", str(keys), "--reattach", f"{REATTACH:g}"
    ) as running:
        yield running


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Connect]:
    """connect(key): a client, each of whose requests comes to some gateway."""
    made: list[aiohttp.ClientSession] = []

    def connect(key: str = "alice") -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {key}"}
        connector = aiohttp.TCPConnector(force_close=True)
        made.append(aiohttp.ClientSession(server.url, headers=headers, connector=connector))
        return made[-1]

    yield connect
    for session in made:
        await session.close()
    assert await asyncio.to_thread(left_after, server, FORGOTTEN) == {}


@asynccontextmanager
async def asked(
    http: aiohttp.ClientSession, method: str, url: str, **more: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer of any gateway; asks again where a gateway that may know better is missing."""
    while True:
        try:
            answer = await http.request(method, url, **more)
        except aiohttp.ClientConnectionError:
            continue  # it came to a gateway that was being killed
        async with answer:
            if answer.status != 503:
                yield answer
                return
            assert (await answer.json())["error"]["code"] == "starting"
        await asyncio.sleep(0.1)


def resumed(
    http: aiohttp.ClientSession, got: bytes
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """The stream behind `got`."""
    event = last_id(got)
    url = f"/v1/streams/{event.rpartition('/')[0]}"
    return asked(http, "GET", url, headers={"Last-Event-ID": event})


async def read(answer: aiohttp.ClientResponse, events: int) -> bytes:
    """So many events more, or as many as there are. An answer whose end its client has not seen is
    kept, so the end is read with the last event."""
    got = await more(answer, events)
    return got + await more(answer, 1 << 30) if got.endswith(b"data: [DONE]\n\n") else got


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[bytes]:
    async def ask() -> list[bytes]:
        headers = {"Authorization": "Bearer alice"}
        async with aiohttp.ClientSession(server.url, headers=headers) as http:
            return await whole(http, PATH, LONG)

    return asyncio.run(ask())


async def test_a_stream_goes_on_at_any_gateway(connect: Connect, undisturbed: list[bytes]) -> None:
    http = connect()
    answer, got = await begun(http, PATH, LONG, 5)
    answer.close()
    while data(got)[-1] != undisturbed[-1]:
        async with resumed(http, got) as answer:
            assert answer.status == 200, await answer.text()
            got += await read(answer, 12)
    assert data(got) == undisturbed
    event = last_id(got)
    url = f"/v1/streams/{event.rpartition('/')[0]}"
    for _ in range(6):
        async with asked(connect("bob"), "GET", url) as other:
            assert other.status == 404, "whoever it belongs to"


async def test_a_stream_goes_on_however_its_gateways_die(
    server: Server, connect: Connect, undisturbed: list[bytes]
) -> None:
    """What a killed gateway had written to the operating system still comes, and is perhaps kept
    nowhere else. So each connection is read to its end."""
    http = connect()
    engine = server.pid("engine")
    answer, got = await begun(http, PATH, LONG, 5)
    async with AsyncExitStack() as opened:
        for stage in GATEWAYS:
            victim = server.pid(stage)

            def back(stage: str = stage, victim: int = victim) -> bool:
                return server.pid(stage) != victim

            with HeldProcesses(
                engine
            ):  # so that the stream does not end while no gateway writes it
                os.kill(victim, signal.SIGKILL)
                await asyncio.to_thread(server.wait, back, "another gateway is there")
            came = await read(answer, 12)
            got += came
            if came.count(b"\n\n") < 12 and data(got)[-1] != undisturbed[-1]:
                answer = await opened.enter_async_context(resumed(http, got))
                assert answer.status == 200, await answer.text()
                got += await read(answer, 12)
        got += await read(answer, 1 << 30)
    while data(got)[-1] != undisturbed[-1]:
        async with resumed(http, got) as answer:
            assert answer.status == 200, await answer.text()
            got += await read(answer, 1 << 30)
    assert data(got) == undisturbed


ODD_TARGETS = (
    b"//v1//streams/x", b"/v1/streams/%zz%20[", b"/v1/streams/%C3%A9?a=%2F&b=[c]",
    b"http://elsewhere:80/v1/streams/x",
)  # fmt: skip
ODD_HEADERS = (b"x-request-id: \xff", b"x-odd: \xff", b"host: \xff")


@pytest.mark.parametrize("target", ODD_TARGETS)
async def test_odd_requests_reach_other_gateways_or_are_refused(
    server: Server, target: bytes
) -> None:
    """Paths and headers that no client of ours would send: nobody knows such a stream."""
    port = int(server.url.rpartition(":")[2])
    for headers, wanted in (
        ((b"host: localhost",), {b"404"}),
        (ODD_HEADERS, {b"400", b"403", b"404"}),
    ):
        lines = [b"GET " + target + b" HTTP/1.1", b"authorization: Bearer alice", *headers]
        status = b"503"
        while status == b"503":  # a gateway that may know better is missing
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\r\n".join([*lines, b"", b""]))
            status = (await reader.readline()).split()[1]
            writer.close()
        assert status in wanted


async def test_a_response_is_found_and_ended_at_any_gateway(
    server: Server, connect: Connect
) -> None:
    http, of_others = connect(), connect("bob")
    with HeldProcesses(server.pid("engine")):  # it does not end by itself
        async with http.post("/v1/responses", json=ENDLESS) as answer:
            url = f"/v1/responses/{(await answer.json())['id']}"
        for _ in range(6):
            async with asked(http, "GET", url) as found, asked(of_others, "GET", url) as hidden:
                assert (await found.json())["status"] in ("queued", "in_progress")
                assert hidden.status == 404, "whoever it belongs to"
            async with asked(http, "GET", f"{url}/input_items") as items:
                assert (await items.json())["data"][0]["content"][0]["text"] == ENDLESS["input"]
        async with asked(http, "POST", f"{url}/cancel") as ended:
            assert (await ended.json())["status"] == "cancelled"
    for _ in range(6):
        async with asked(http, "POST", f"{url}/cancel") as again:
            assert (await again.json())["status"] == "cancelled"
    async with asked(http, "DELETE", url) as deleted:
        assert (await deleted.json())["deleted"] is True
    for _ in range(6):
        async with asked(http, "GET", url) as gone, asked(http, "DELETE", url) as twice:
            assert (gone.status, twice.status) == (404, 404)


async def test_what_is_stored_and_kept_elsewhere_is_streamed_and_deleted_at_any_gateway(
    connect: Connect,
) -> None:
    """The store is one, and whoever looks there finds it; its events and a copy are elsewhere."""
    http = connect()
    short = ENDLESS | {"max_output_tokens": 5}
    async with http.post("/v1/responses", json=short | {"stream": True}) as answer:
        events = await answer.text()
        url = f"/v1/responses/{answer.headers['x-pipeinfer-stream']}"
    for _ in range(6):
        async with asked(http, "GET", url, params={"stream": "true"}) as again:
            assert await again.text() == events
    async with asked(http, "DELETE", url) as deleted:
        assert (await deleted.json())["deleted"] is True
    for _ in range(6):
        async with (
            asked(http, "GET", url) as gone,
            asked(http, "GET", f"{url}/input_items") as items,
        ):
            assert (gone.status, items.status) == (404, 404)

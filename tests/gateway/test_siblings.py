"""Gateways of a host that pass requests on: whom they ask, whom they serve, and what gets lost."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from raw_http import RawClient

from pipeinfer.gateway.connections import Acceptor, Connections
from pipeinfer.gateway.errors import ApiError, error_response
from pipeinfer.gateway.health import ExpectedStage, Health
from pipeinfer.gateway.peers import Siblings, is_forwarded, socket_name
from waiting import until

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STAGES = ("gateway-0", "gateway-1", "gateway-2")
PATIENCE = 5.0  # seconds that an answer may take, and a gateway that hangs takes longer


class Door:
    """The HTTP side of one gateway. `handler` answers what another gateway passes on; what clients
    ask is passed on."""

    def __init__(self, stage: str, addresses: dict[str, str], handler: Handler) -> None:
        others = {other: address for other, address in addresses.items() if other != stage}
        health = Health(ExpectedStage(stage, "gateway") for stage in addresses)
        for row in health.stages.values():
            row.state = "ready"
        self.siblings = Siblings(stage, addresses[stage], others, health, first=True)
        self.handler = handler
        self.socket_name = socket_name(addresses[stage])
        app = web.Application(middlewares=[_errors])
        app.router.add_route("*", "/v1/streams/{id}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True)

    async def open(self) -> None:
        await self._runner.setup()
        assert self._runner.server is not None
        self.connections = Connections(self._runner.server, 64, lambda: None, lambda: None)
        self.siblings.listen(self.connections)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._acceptor = Acceptor(listener, partial(self.connections.accept, context=None))

    async def close(self) -> None:
        self.siblings.close()
        self._acceptor.close()
        self.connections.stop()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if is_forwarded(request):
            return await self.handler(request)
        return await self.siblings.forward(request) or web.json_response({}, status=404)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)


async def has_it_not(_request: web.Request) -> web.StreamResponse:
    return web.json_response({}, status=404)


async def has_it(request: web.Request) -> web.StreamResponse:
    return web.json_response({name.lower(): value for name, value in request.headers.items()})


@pytest.fixture
async def doors() -> AsyncIterator[list[Door]]:
    """Three gateways of a host. The last one has what clients ask for."""
    addresses = {stage: f"ipc:///{uuid.uuid4()}" for stage in STAGES}
    made = [Door(stage, addresses, has_it_not) for stage in STAGES]
    made[2].handler = has_it
    for door in made:
        await door.open()
    await until(lambda: all(map(listens, made)))
    yield made
    for door in made:
        await door.close()


def listens(door: Door) -> bool:
    with socket.socket(socket.AF_UNIX) as found:
        return found.connect_ex(door.socket_name) == 0


async def ask(door: Door, **headers: str) -> tuple[int, dict[str, str]]:
    timeout, url = aiohttp.ClientTimeout(PATIENCE), f"{door.url}/v1/streams/x"
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.get(url, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def test_what_another_gateway_has_is_found(doors: list[Door]) -> None:
    assert (await ask(doors[0], authorization="Bearer k"))[1]["authorization"] == "Bearer k"
    doors[2].handler = has_it_not
    assert (await ask(doors[0]))[0] == 404
    doors[2].handler = has_it_not
    assert (await ask(doors[0]))[0] == 404


async def test_a_gateway_that_hangs_delays_no_answer_of_others(doors: list[Door]) -> None:
    async def hangs(_request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    doors[1].handler = hangs
    assert (await ask(doors[0]))[0] == 200


@pytest.mark.parametrize("status", (401, 503))
async def test_what_one_does_not_know_yet_another_may_have(doors: list[Door], status: int) -> None:
    """It is being started, or does not know a new key yet."""

    async def does_not_say(_request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=status)

    doors[1].handler = does_not_say
    assert (await ask(doors[0]))[0] == 200
    doors[2].handler = has_it_not
    found, told = await ask(doors[0])
    assert (found, told["error"]["code"]) == (503, "starting")  # type: ignore[index]


async def test_headers_are_passed_on_or_stay_wrong(doors: list[Door]) -> None:
    client = RawClient(*await asyncio.open_connection("127.0.0.1", int(doors[0].url[17:])))
    lines = (b"host: x", b"x-api-key: schl\xc3\xbcssel", b"last-event-id: x/1\xff")
    client.send(
        b"\r\n".join([b"GET /v1/streams/x HTTP/1.1", *lines, b"connection: close", b"", b""])
    )
    body = (await client.all()).partition(b"\r\n\r\n")[2]
    assert b'"x-api-key": "schl\\u00fcssel"' in body
    assert b'"last-event-id": "x/1?"' in body, "without it, the stream would begin anew"
    await client.close()


async def test_only_processes_of_the_same_user_are_asked_and_served(
    doors: list[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may connect to a name of the abstract namespace, and take one that is free."""
    other = os.geteuid() + 1
    with socket.socket(socket.AF_UNIX) as found:
        monkeypatch.setattr("os.geteuid", lambda: other)
        found.connect(doors[1].socket_name)
        found.setblocking(False)
        found.send(b"GET /v1/streams/x HTTP/1.1\r\nhost: x\r\nx-pipeinfer-forwarded: y\r\n\r\n")
        with pytest.raises(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(found, 1) == b""
            raise ConnectionResetError
    assert (await ask(doors[0]))[0] == 503, "none of them is known to be a gateway"


async def test_connections_of_gateways_count_as_those_of_clients(doors: list[Door]) -> None:
    """So that they are bounded, and end where a head of a request does not."""
    before = len(doors[1].connections)
    with socket.socket(socket.AF_UNIX) as found:
        found.connect(doors[1].socket_name)
        found.send(b"GET /v1/str")
        await until(lambda: len(doors[1].connections) == before + 1)
    await until(lambda: len(doors[1].connections) == before)


async def test_what_is_passed_on_is_in_no_log(
    doors: list[Door], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        await ask(doors[0])
    assert [r.getMessage() for r in caplog.records if r.name.startswith("aiohttp")] == []


class Silent:
    """A stream that says something and then nothing more. left: its reader is gone."""

    def __init__(self, *parts: bytes) -> None:
        self.parts, self.more, self.left = parts, asyncio.Event(), asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for part in self.parts:
                await response.write(part)
                await self.more.wait()
                self.more.clear()
        finally:
            self.left.set()
        return response


async def begun(door: Door, part: bytes) -> RawClient:
    """A client that has read so far."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", int(door.url[17:])))
    client.send(b"GET /v1/streams/x HTTP/1.1\r\nhost: x\r\n\r\n")
    await client.reader.readuntil(part)
    return client


@pytest.mark.parametrize("half", (True, False), ids=("sends no more", "at once"))
async def test_a_client_that_leaves_a_silent_stream_is_missed(
    doors: list[Door], half: bool
) -> None:
    """Else the gateway that has the stream would keep it for its reader."""
    silent = doors[2].handler = Silent(b"data: 1\n\n")
    client = await begun(doors[0], b"data: 1\n\n")
    assert len(doors[2].connections) == 1
    await until(lambda: not len(doors[1].connections))  # it has answered
    if half:
        client.half_close()
        await asyncio.wait_for(client.reader.readuntil(b":\n"), PATIENCE)
        assert not silent.left.is_set(), "it reads on"
    await client.close()
    await asyncio.wait_for(silent.left.wait(), PATIENCE)


async def test_no_comment_stands_within_an_event(
    doors: list[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.gateway.connections.CHECK_DELAYS", (0.001,))
    silent = doors[2].handler = Silent(b"data: one", b" two\n\n")
    client = await begun(doors[0], b"data: one")
    client.half_close()
    await asyncio.sleep(0.2)  # many probes
    silent.more.set()
    rest = await client.reader.readuntil(b"two\n\n")
    assert b":\n" not in rest
    await asyncio.wait_for(client.reader.readuntil(b":\n"), PATIENCE)
    await client.close()

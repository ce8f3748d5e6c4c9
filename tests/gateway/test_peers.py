"""Limits that several gateways hold together: never more than the whole, and none is lost. And
gateways of a host that pass requests on: whom they ask, whom they serve, and what gets lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from raw_http import RawClient

from pipeinfer.control import GatewayState, ShareState
from pipeinfer.gateway.api_keys import LIMIT_NAMES, KeyLimits, KeyUsage
from pipeinfer.gateway.connections import Acceptor, Connections
from pipeinfer.gateway.errors import ApiError, error_response
from pipeinfer.gateway.health import ExpectedStage, Health
from pipeinfer.gateway.peers import (
    HostGateways,
    LimitName,
    LimitShare,
    SharedLimits,
    StateExchange,
    first_share,
    is_forwarded,
    socket_name,
)
from waiting import until

LIMIT = LimitName("alice", "concurrent")
TOKENS = LimitName("alice", "tokens")


class Gateway:
    """One gateway's accounts of a key."""

    def __init__(self, index: int, gateways: int, limits: KeyLimits, now: float = 0.0) -> None:
        self.shares = SharedLimits(index, gateways)
        self.usage = KeyUsage(limits, now)
        self.shares.add("alice", self.usage, LIMIT_NAMES, now)


class Sharing(RuleBasedStateMachine):
    """States travel late, twice, in any order or never; one gateway at a time is started again."""

    @initialize(gateways=st.integers(2, 4), limit=st.integers(0, 9))
    def begin(self, gateways: int, limit: int) -> None:
        self.limits = KeyLimits(concurrent=limit + 1)
        self.all = [Gateway(index, gateways, self.limits) for index in range(gateways)]
        self.sent: list[tuple[int, ShareState]] = []
        self.running = [0] * gateways

    def _index(self, number: int) -> int:
        return number % len(self.all)

    @rule(number=st.integers(0, 3))
    def ask(self, number: int) -> None:
        index = self._index(number)
        if self.all[index].usage.start_request(0.0) is None:
            self.running[index] += 1

    @rule(number=st.integers(0, 3))
    def end(self, number: int) -> None:
        index = self._index(number)
        if self.running[index]:
            self.running[index] -= 1
            self.all[index].usage.release()

    @rule(number=st.integers(0, 3), wanted=st.integers(0, 4))
    def say(self, number: int, wanted: int) -> None:
        index = self._index(number)
        self.all[index].shares.lacks(LIMIT, wanted)
        self.sent.append((index, self.all[index].shares.state(LIMIT, 0.0)))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1_000), number=st.integers(0, 3))
    def hear(self, which: int, number: int) -> None:
        sender, state = self.sent[which % len(self.sent)]
        self.all[self._index(number)].shares.on_state(sender, state, 0.0)

    @rule(number=st.integers(0, 3))
    def start_again(self, number: int) -> None:
        """It hears all others before it lets anybody in, or gives; and they have heard all that it
        said."""
        index = self._index(number)
        for receiver, one in enumerate(self.all):
            for sender, state in self.sent:
                if index in (sender, receiver):
                    one.shares.on_state(sender, state, 0.0)
        last = self.all[index].shares.state(LIMIT, 0.0)
        for one in self.all:
            one.shares.on_state(index, last, 0.0)
        self.sent.clear()
        self.running[index] = 0
        self.all[index] = Gateway(index, len(self.all), self.limits)
        for sender, one in enumerate(self.all):
            if sender != index:
                state = one.shares.state(LIMIT, 0.0)
                self.all[index].shares.on_state(sender, state, 0.0, gives=False)

    @invariant()
    def never_more_than_the_whole(self) -> None:
        if hasattr(self, "all"):
            sizes = sum(one.shares._shares[LIMIT].size for one in self.all)
            assert sizes <= self.limits.concurrent and sum(self.running) <= self.limits.concurrent

    def teardown(self) -> None:
        """Once all have heard all, nothing is missing."""
        if not hasattr(self, "all"):
            return
        for _ in range(2):
            for sender, one in enumerate(self.all):
                one.shares.lacks(LIMIT, 0)
                state = one.shares.state(LIMIT, 0.0)
                for other in self.all:
                    other.shares.on_state(sender, state, 0.0)
        assert sum(one.shares._shares[LIMIT].size for one in self.all) == self.limits.concurrent


TestSharing = Sharing.TestCase


@given(st.integers(1, 9), st.integers(0, 1_000))
def test_the_first_shares_are_the_whole_and_nearly_equal(gateways, limit):
    sizes = [first_share(index, gateways, limit) for index in range(gateways)]
    assert sum(sizes) == limit and max(sizes) - min(sizes) <= 1


def tell(sender: int, all_gateways: list[Gateway], limit: LimitName, now: float) -> None:
    """What one says reaches all, and what they answer reaches it."""
    state = all_gateways[sender].shares.state(limit, now)
    for index, one in enumerate(all_gateways):
        if index != sender:
            one.shares.on_state(sender, state, now)
            all_gateways[sender].shares.on_state(index, one.shares.state(limit, now), now)


@given(st.integers(2, 4), st.integers(1, 12), st.integers(0, 100))
def test_whoever_asks_is_let_in_while_the_whole_has_room(gateways, limit, seed):
    """Wherever requests come, as many run as with one gateway."""
    all_gateways = [Gateway(n, gateways, KeyLimits(concurrent=limit)) for n in range(gateways)]
    rng, running = random.Random(seed), list[int]()
    for _ in range(60):
        index = rng.randrange(gateways)
        one = all_gateways[index]
        if rng.random() < 0.3 and running:
            all_gateways[running.pop(rng.randrange(len(running)))].usage.release()
            continue
        excess = one.usage.start_request(0.0)
        if excess is not None:
            kind, units = excess.lacking
            assert kind == "concurrent"
            one.shares.lacks(LIMIT, units)
            tell(index, all_gateways, LIMIT, 0.0)
            one.shares.lacks(LIMIT, 0)
            excess = one.usage.start_request(0.0)
        if excess is None:
            running.append(index)
        assert (excess is not None) == (len(running) == limit and excess is not None)
        assert len(running) <= limit
        if excess is not None:
            assert len(running) == limit


def test_tokens_of_a_minute_move_to_where_they_are_used_and_refill_there():
    limits = KeyLimits(tokens=600)
    one, other = both = [Gateway(index, 2, limits) for index in range(2)]
    assert one.usage.free("tokens", 0.0) == other.usage.free("tokens", 0.0) == 300
    one.usage.use_tokens(350, 0.0)
    excess = one.usage.start_request(0.0)
    assert excess is not None and excess.lacking == ("tokens", 51) and excess.wait == 5.1
    one.shares.lacks(TOKENS, 51)
    tell(0, both, TOKENS, 0.0)
    assert (one.usage.free("tokens", 0.0), other.usage.free("tokens", 0.0)) == (100, 150)
    assert one.shares.free_elsewhere(TOKENS) == 150
    # The whole refills as that of one gateway: ten a second, now mostly here.
    assert one.usage.free("tokens", 6.0) == 100 + 45
    assert other.usage.free("tokens", 6.0) == 150
    other.usage.use_tokens(150, 6.0)
    assert other.usage.free("tokens", 12.0) == 15


def test_a_limit_that_is_changed_keeps_what_was_given_and_used():
    one, other = both = [Gateway(index, 2, KeyLimits(concurrent=4)) for index in range(2)]
    one.shares.lacks(LIMIT, 1)
    tell(0, both, LIMIT, 0.0)
    assert (one.usage.free("concurrent", 0.0), other.usage.free("concurrent", 0.0)) == (3, 1)
    for gateway in both:
        gateway.usage.set_limits(KeyLimits(concurrent=8), 0.0)
        gateway.shares.add("alice", gateway.usage, LIMIT_NAMES, 0.0)
    assert (one.usage.free("concurrent", 0.0), other.usage.free("concurrent", 0.0)) == (5, 3)
    for gateway in both:
        gateway.usage.set_limits(KeyLimits(), 0.0)
        gateway.shares.add("alice", gateway.usage, LIMIT_NAMES, 0.0)
    assert one.usage.start_request(0.0) is None is other.usage.start_request(0.0)


def test_what_no_gateway_could_have_said_changes_nothing():
    one = Gateway(0, 2, KeyLimits(concurrent=4))
    for sender, given_units in ((0, (9, 9)), (7, (9, 9)), (1, (9, 9, 9)), (1, ())):
        state = ShareState("alice", "concurrent", given_units, given_units, 5, 0)
        assert not one.shares.on_state(sender, state, 0.0)
    assert one.usage.free("concurrent", 0.0) == 2


def test_a_share_is_given_by_halves_so_that_few_questions_suffice():
    share = LimitShare(0, 2, 200)
    assert [share.give(1, 1, share.size) for _ in range(4)] == [50, 25, 13, 6]
    assert share.give(1, 100, 6) == 6 and share.size == 0
    assert share.give(1, 1, 0) == 0


def heard(sender: StateExchange, of: str, receiver: StateExchange, who: str) -> bool:
    """`sender`, called `of`, tells `receiver`, called `who`."""
    incarnation, number = sender.heard_of(who)
    return receiver.merge(
        GatewayState(
            stage=of,
            incarnation=sender.incarnation,
            number=sender.number,
            since=sender.seen_by(who),
            heard_incarnation=incarnation,
            heard=number,
        )
    )


def test_changes_are_told_until_they_are_heard_and_a_new_process_is_told_all():
    a, b = StateExchange(1, ["b"]), StateExchange(1, ["a"])
    number = a.change(("adapter", "x"))
    assert list(a.news_for("b")) == [("adapter", "x")] and not a.has_heard("b", number)
    assert heard(a, "a", b, "b") and heard(b, "b", a, "a")
    assert a.has_heard("b", number) and not list(a.news_for("b"))
    assert not heard(a, "a", b, "b"), "nothing new"
    a.change(("adapter", "y"))
    a.change(("adapter", "x"))
    assert list(a.news_for("b")) == [("adapter", "x"), ("adapter", "y")]
    again = StateExchange(2, ["a"])
    a.change(("adapter", "z"))
    assert not heard(a, "a", again, "b"), "it was told only what the one before had not heard"
    assert again.heard_of("a") == (1, 0)
    assert heard(again, "b", a, "a"), "a new process has something to say"
    assert [name for _, name in a.news_for("b")] == ["z", "x", "y"] and not a.has_heard("b", 1)
    assert heard(a, "a", again, "b") and again.heard_of("a") == (1, a.number)
    assert not heard(b, "b", a, "a"), "a process that was replaced is not heard"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
STAGES = ("gateway-0", "gateway-1", "gateway-2")
PATIENCE = 60.0  # seconds that an answer may take, and a gateway that hangs takes longer


class Door:
    """The HTTP side of one gateway. `handler` answers what another gateway passes on; what clients
    ask is passed on."""

    def __init__(
        self,
        stage: str,
        addresses: dict[str, str],
        handler: Handler,
        elsewhere: dict[str, list[str]] | None = None,
    ) -> None:
        others = {other: address for other, address in addresses.items() if other != stage}
        known = [*addresses, *(one for ids in (elsewhere or {}).values() for one in ids)]
        self.health = Health(ExpectedStage(stage, "gateway") for stage in known)
        for row in self.health.stages.values():
            row.state = "ready"
        self.siblings = HostGateways(
            stage, addresses[stage], others, self.health, first=True, elsewhere=elsewhere
        )
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


async def test_a_gateway_that_hangs_delays_no_answer_of_others(
    doors: list[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeinfer.gateway.peers.ANSWER_SECONDS", 600.0)

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
    await until(lambda: len(doors[2].connections) == 1)
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


@pytest.fixture
async def other_host(doors: list[Door]) -> AsyncIterator[Door]:
    """A gateway of another host, which asks that of `doors` which is at the shared port."""
    alone = {"gateway-3": f"ipc:///{uuid.uuid4()}"}
    made = Door("gateway-3", alone, has_it_not, elsewhere={doors[0].url: [*STAGES]})
    await made.open()
    yield made
    await made.close()


async def test_what_another_host_has_is_found_at_any_of_its_gateways(
    doors: list[Door], other_host: Door
) -> None:
    found, headers = await ask(other_host, authorization="Bearer k", **{"last-event-id": "x/1"})
    assert found == 200
    assert headers["authorization"] == "Bearer k" and headers["last-event-id"] == "x/1"
    assert headers["x-pipeinfer-forwarded"] == "gateway-0", "its host's gateway has asked the last"
    doors[2].handler = has_it_not
    assert (await ask(other_host))[0] == 404


@pytest.mark.parametrize("always", [True, False])
async def test_what_a_proxy_compresses_arrives_as_it_is(doors: list[Door], always: bool) -> None:
    """Whether or not it was asked to."""

    async def compressed(_request: web.Request) -> web.StreamResponse:
        response = web.json_response({"text": "word " * 1000})
        response.enable_compression(web.ContentCoding.gzip if always else None)
        return response

    doors[2].handler = compressed
    assert await ask(doors[0]) == (200, {"text": "word " * 1000})


async def test_hosts_that_ask_each_other_ask_once(other_host: Door) -> None:
    """However the URLs name them, as with one of a load balancer before all."""
    asked = 0

    async def count(_request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.json_response({}, status=404)

    addresses = {stage: f"ipc:///{uuid.uuid4()}" for stage in ("gateway-4", "gateway-5")}
    sibling = Door("gateway-5", addresses, count)
    first = Door("gateway-4", addresses, has_it_not, elsewhere={other_host.url: ["gateway-3"]})
    for door in (first, sibling):
        await door.open()
    await until(lambda: listens(sibling))
    other_host.siblings._elsewhere = [
        replace(place, url=first.url) for place in other_host.siblings._elsewhere
    ]
    try:
        assert (await ask(first))[0] == 404 and asked == 1
        assert (await ask(other_host))[0] == 404 and asked == 2
    finally:
        for door in (first, sibling):
            await door.close()


async def test_a_host_that_is_not_there_may_have_it(doors: list[Door], other_host: Door) -> None:
    for stage in STAGES:
        other_host.health.stages[stage].state = "lost"
    assert (await ask(other_host))[0] == 503
    other_host.health.stages["gateway-1"].state = "ready"
    await doors[0].close()
    assert (await ask(other_host))[0] == 503
    await doors[0].open()

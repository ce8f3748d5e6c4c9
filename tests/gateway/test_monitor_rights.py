"""Who is told what of others at /monitor: prompts, requests, and for how long."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway

from pipeinfer.control import Observed, Prefix, Prefixes, RequestSpan, ShowPrefixes
from pipeinfer.gateway.auth import ClientHashes
from pipeinfer.gateway.monitor import PipelineMonitor
from pipeinfer.messages import Message
from pipeinfer.wire import pack

SOON = 60.0
OPEN = Prefix(64, 3, 0, pack([7, 8]))
SALTED = Prefix(48, 1, 0, b"")  # as engines tell them


def line(name: str, key: str, more: str = "") -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()} {more}\n"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.txt"
    file.write_text(line("alice", "a") + line("bob", "b") + line("root", "r", "admin"))
    return file


def headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def sight(gateway: Gateway) -> PipelineMonitor:
    found = gateway.driver._context.monitor
    assert found is not None
    return found


def cached(gateway: Gateway) -> None:
    """An engine that answers what its cache holds."""

    def ask(stage: str, question: Message) -> None:
        if isinstance(question, ShowPrefixes):
            sight(gateway).on_message(Prefixes(question.question, stage, (OPEN, SALTED)))

    sight(gateway).open(ask)


async def prefixes(gateway: Gateway, key: str | None = None, **more: str) -> list[dict]:
    async with httpx.AsyncClient(headers={**headers(key), **more}) as http:
        response = await http.get(f"{gateway.url}/monitor/prefixes")
    assert response.status_code == 200, response.text
    [group] = response.json()["groups"]
    return group["prefixes"]


def hashed(name: str) -> str:
    """Of a key's name, as other gateways and the stages know it."""
    return ClientHashes().of_key(name)


async def completed(gateway: Gateway, key: str) -> str:
    """The id of a request; its stage tells of it, as it does while somebody looks."""
    client = gateway.client(key)
    name = (await client.completions.create(model="test", prompt="a")).id
    sight(gateway).on_message(
        Observed("gateway-0", 1, (RequestSpan("gateway-0", name, 1.0, 2.0, "stop"),))
    )
    return name


class Feed:
    """One that is open. `next()`: the ids of requests in its next event."""

    def __init__(self, response: httpx.Response) -> None:
        self.lines: AsyncIterator[str] = response.aiter_lines()

    async def next(self) -> set[str]:
        async for text in self.lines:
            if text.startswith("data: "):
                return {one["id"] for one in json.loads(text[6:])["requests"]}
        raise EOFError

    async def sees(self, name: str) -> None:
        while name not in await self.next():
            pass

    async def end(self) -> None:
        """Waits for it; a connection that breaks raises."""
        async for _ in self.lines:
            pass


def feed(http: httpx.AsyncClient, gateway: Gateway, key: str | None):
    return http.stream("GET", f"{gateway.url}/monitor/events", headers=headers(key))


def without_text(told: list[dict]) -> bool:
    return [set(one) for one in told] == [{"tokens", "sequences", "locks"}] * 2


async def test_texts_of_prefixes_are_told_on_loopback_without_keys_and_salted_ones_never(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway()
    cached(gateway)
    told, salted = await prefixes(gateway)
    assert told["ids"] == [7, 8] and "text" in told
    assert salted == {"tokens": 48, "sequences": 1, "locks": 0}
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"):
        assert without_text(await prefixes(gateway, **{name: "x"})), "a proxy's client is elsewhere"
    network = await start_gateway(host="0.0.0.0")
    cached(network)
    assert without_text(await prefixes(network)), "others reach it, too"


async def test_texts_of_prefixes_are_told_to_an_operators_key_alone(
    start_gateway: StartGateway, keys: Path
) -> None:
    one = await start_gateway(api_key="k")  # which many may have
    cached(one)
    assert without_text(await prefixes(one, "k"))
    several = await start_gateway(api_key_file=str(keys), host="0.0.0.0")
    cached(several)
    assert without_text(await prefixes(several, "a"))
    told, salted = await prefixes(several, "r")
    assert told["ids"] == [7, 8] and "text" not in salted and "ids" not in salted


async def test_a_feed_ends_with_its_key_and_others_go_on(
    start_gateway: StartGateway, keys: Path
) -> None:
    gateway = await start_gateway(api_key_file=str(keys))
    assert gateway.reload is not None
    async with (
        httpx.AsyncClient(timeout=SOON) as http,
        feed(http, gateway, "a") as gone,
        feed(http, gateway, "b") as other_key,
        feed(http, gateway, "r") as stays,
    ):
        gone_feed, other_feed, root = Feed(gone), Feed(other_key), Feed(stays)
        for one in (gone_feed, other_feed, root):
            await one.next()
        keys.write_text(line("bob", "another") + line("root", "r", "admin"))
        gateway.reload()
        await asyncio.wait_for(gone_feed.end(), SOON)
        await asyncio.wait_for(other_feed.end(), SOON)  # the name stays, with another key
        await asyncio.wait_for(root.sees(await completed(gateway, "another")), SOON)
        again = await http.get(f"{gateway.url}/monitor/prefixes", headers=headers("a"))
        assert again.status_code == 401


async def test_a_feed_without_a_key_ends_when_keys_are_needed(
    start_gateway: StartGateway, keys: Path
) -> None:
    text = keys.read_text()
    keys.write_text("")
    gateway = await start_gateway(api_key_file=str(keys))
    assert gateway.reload is not None
    async with httpx.AsyncClient(timeout=SOON) as http, feed(http, gateway, None) as response:
        anybody = Feed(response)
        await anybody.next()
        keys.write_text(text)
        gateway.reload()
        await asyncio.wait_for(anybody.end(), SOON)


async def test_requests_of_others_are_told_to_operators_alone_and_no_longer_than_they_are(
    start_gateway: StartGateway, keys: Path
) -> None:
    gateway = await start_gateway(api_key_file=str(keys))
    assert gateway.reload is not None

    async def way(name: str, key: str) -> int:
        url = f"{gateway.url}/monitor/requests/{name}"
        return (await http.get(url, headers=headers(key))).status_code

    async with (
        httpx.AsyncClient(timeout=SOON) as http,
        feed(http, gateway, "a") as alices,
        feed(http, gateway, "r") as roots,
    ):
        alice, root = Feed(alices), Feed(roots)
        await alice.next()
        await root.next()
        bobs = await completed(gateway, "b")
        own = await completed(gateway, "a")
        seen = set[str]()
        while own not in seen:
            seen |= await asyncio.wait_for(alice.next(), SOON)
        assert seen == {own}
        await asyncio.wait_for(root.sees(bobs), SOON)
        assert [await way(bobs, key) for key in "abr"] == [404, 200, 200]
        keys.write_text(line("alice", "a") + line("bob", "b") + line("root", "r"))
        gateway.reload()
        bobs = await completed(gateway, "b")
        roots_own = await completed(gateway, "r")
        seen = set[str]()
        while roots_own not in seen:
            seen |= await asyncio.wait_for(root.next(), SOON)
        assert bobs not in seen


async def test_choices_of_a_request_are_its_clients(
    start_gateway: StartGateway, keys: Path
) -> None:
    gateway = await start_gateway(api_key_file=str(keys))
    client = gateway.client("a")
    name = (await client.completions.create(model="test", prompt=["a", "b"], n=2)).id
    for index in range(2):
        for choice in ("", "/1"):
            request_id = gateway.pipeline.submits[index].request_id + choice
            assert request_id.startswith(name)
            assert sight(gateway).is_owner(request_id, hashed("alice"))
            assert not sight(gateway).is_owner(request_id, hashed("bob"))


async def test_a_client_sees_its_requests_of_other_gateways(
    start_gateway: StartGateway, keys: Path
) -> None:
    gateway = await start_gateway(api_key_file=str(keys))
    async with httpx.AsyncClient(timeout=SOON) as http, feed(http, gateway, "a") as alices:
        alice = Feed(alices)
        await alice.next()
        spans = [
            RequestSpan("gateway-1", f"{key}-{n}", 1.0, 2.0, "stop", client=hashed(key))
            for key in ("bob", "alice")
            for n in ("r", "r/1")
        ]
        sight(gateway).on_message(Observed("gateway-1", 1, tuple(spans)))
        seen = set[str]()
        while "alice-r/1" not in seen:
            seen |= await asyncio.wait_for(alice.next(), SOON)
        assert seen == {"alice-r", "alice-r/1"}
        for name, status in (("alice-r/1", 200), ("bob-r", 404)):
            url = f"{gateway.url}/monitor/requests/{name.replace('/', '%2F')}"
            assert (await http.get(url, headers=headers("a"))).status_code == status

"""A real server whose only gateway is killed: answers go on, and each byte of them comes once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from leftovers import left_after, leftovers
from streams import TRIES
from swaps import swap
from test_resumable_answers import FORMS as PLAIN_FORMS
from test_resumable_answers import PROMPT, last_id

from held_processes import HeldProcesses, held_engines
from servers import Server

REATTACH = 30.0  # seconds, in which a busy machine starts a gateway
# Seconds in which what waits for a client is forgotten. What was lost with a stage takes a minute.
SETTLED = 45.0
KEY = "pik-alice-s3cret"
LONG = {"max_tokens": 400, "temperature": 0.8, "seed": 7, "ignore_eos": True, "stream": True}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{path: (path, {**body, **({"max_tokens": 400} if "max_tokens" in body else {})})
       for path, body in PLAIN_FORMS.items()},
    "/v1/responses": ("/v1/responses", PLAIN_FORMS["/v1/responses"] | {"max_output_tokens": 400}),
    "log-probs": ("/v1/chat/completions", LONG | {
        "messages": PROMPT, "logprobs": True, "top_logprobs": 3, "stop": ["never said"]}),
}  # fmt: skip
# Log-probs are rounded otherwise in other company.
TOGETHER = (tuple(form for form in FORMS if form != "log-probs"), ("log-probs",))
T = TypeVar("T")
# What differs between two runs of one request, and says nothing.
RANDOM = re.compile(
    rb"(chatcmpl|cmpl|msg|resp|rs)[-_][0-9a-f]{32,48}"
    rb'|"(created|created_at|completed_at|cached_tokens|cache_read_input_tokens|input_tokens)":\d+'
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("outlived") / "responses.db"
    arguments = ("--api-key", KEY, "--reattach", f"{REATTACH:g}", "--kv-pages", "600")
    with Server(*arguments, "--store", str(store)) as running:
        yield running


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as made:
        yield made


def pids_of(server: Server) -> dict[str, int]:
    return {stage["name"]: stage["pid"] for stage in server.health()["stages"]}


async def kill(server: Server, *stages: str, engines: HeldProcesses | None = None) -> float:
    """-9 of stages at once; returns when others are in their places, and how long that took.
    engines: stand still until then, so that no answer ends before the kill."""
    pids = await asyncio.to_thread(pids_of, server)
    began = time.monotonic()
    for stage in stages:
        os.kill(pids[stage], signal.SIGKILL)
    if engines is not None:
        engines.release()

    def back() -> bool:
        now = server.health()
        found = {stage["name"]: stage["pid"] for stage in now["stages"]}
        others = all(found.get(stage) != pids[stage] for stage in stages)
        return others and now["status"] == "ready"

    await asyncio.to_thread(server.wait, back, f"{stages} are back")
    return time.monotonic() - began


async def begun(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], events: int, **headers: str
) -> tuple[aiohttp.ClientResponse, bytes]:
    """A stream of which so many events have come."""
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status == 200, await answer.text()
    return answer, await more(answer, events)


async def more(answer: aiohttp.ClientResponse, events: int) -> bytes:
    """Whole events, so many at least, or as many as come before the connection ends."""
    got = b""
    try:
        while got.count(b"\n\n") < events or not got.endswith(b"\n\n"):
            if not (data := await answer.content.readany()):
                break
            got += data
    except aiohttp.ClientError:
        answer.close()
    return got[: got.rfind(b"\n\n") + 2] if b"\n\n" in got else b""


async def known(
    http: aiohttp.ClientSession, url: str, headers: dict[str, str] | None = None
) -> aiohttp.ClientResponse:
    """The answer to a GET, from a gateway that has heard of all that it is to go on with."""
    async with asyncio.timeout(60):
        while (answer := await http.get(url, headers=headers)).status == 503:
            answer.close()
            await asyncio.sleep(0.05)
    assert answer.status == 200, await answer.text()
    return answer


async def go_on(http: aiohttp.ClientSession, got: bytes) -> aiohttp.ClientResponse:
    """The stream behind what a client has got."""
    event = last_id(got)
    url = f"/v1/streams/{event.rpartition('/')[0]}"
    return await known(http, url, {"Last-Event-ID": event})


async def rest(http: aiohttp.ClientSession, got: bytes) -> bytes:
    """What comes behind what a client has got."""
    async with await go_on(http, got) as answer:
        return await more(answer, 1 << 30)


def data(stream: bytes) -> list[bytes]:
    """The events without their ids, and without what is random."""
    events = RANDOM.sub(b"-", stream).split(b"\n\n")[:-1]
    return [re.sub(rb"^id: .*\n", b"", event) for event in events]


async def whole(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[bytes]:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return data(await answer.read())


async def for_each(forms: tuple[str, ...], call: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """What each call comes to, all begun at once."""
    return dict(zip(forms, await asyncio.gather(*map(call, forms)), strict=True))


def same_events(form: str, got: bytes, undisturbed: list[bytes]) -> None:
    """Two choices of one request are two rows of the engine, of which one may be ahead."""
    ordered = Counter if "n" in FORMS[form][1] else list
    assert ordered(data(got)) == ordered(undisturbed) and data(got)[-1] == undisturbed[-1], form


async def settled(server: Server) -> None:
    """Asserts that within SETTLED no stage remembers a request."""
    assert await asyncio.to_thread(left_after, server, SETTLED) == {}


class ReadStream:
    """A stream as its client reads it, from connection to connection.

    Attributes:
    - undisturbed: its events without any kill
    - got: bytes of whole events that have come
    """

    def __init__(
        self, http: aiohttp.ClientSession, answer: aiohttp.ClientResponse, got: bytes,
        undisturbed: list[bytes],
    ) -> None:  # fmt: skip
        self._http = http
        self._answer = answer
        self.got = got
        self.undisturbed = undisturbed

    async def read(self, events: int = 1 << 30) -> None:
        """So many more events at least, or as many as come before the connection ends."""
        self.got += await more(self._answer, events)

    async def resume(self) -> None:
        """What the gateway that died has written; then some events from another, whose connection
        stays open, unless that was all. What a gateway has written to the operating system is not
        kept for another one, so it must be read."""
        await self.read()
        if data(self.got)[-1] == self.undisturbed[-1]:
            return
        self._answer = await go_on(self._http, self.got)
        await self.read(10)


async def streams_begun(http: aiohttp.ClientSession, forms: tuple[str, ...]) -> list[ReadStream]:
    """One of each form, begun at once, of which some events have come."""
    undisturbed = await for_each(forms, lambda form: whole(http, *FORMS[form]))
    streams = await for_each(forms, lambda form: begun(http, *FORMS[form], 10))
    return [ReadStream(http, *streams[form], undisturbed[form]) for form in forms]


@pytest.mark.parametrize("forms", TOGETHER, ids=len)
async def test_streams_outlive_gateways(
    server: Server, http: aiohttp.ClientSession, forms: tuple[str, ...]
) -> None:
    """Resumed at a second gateway, each is read a little, and then at a third one."""
    streams = await streams_begun(http, forms)
    for _ in range(2):
        await kill(server, "gateway")
        await asyncio.gather(*(stream.resume() for stream in streams))
    await asyncio.gather(*(stream.read() for stream in streams))
    for form, stream in zip(forms, streams, strict=True):
        same_events(form, stream.got, stream.undisturbed)


@pytest.mark.parametrize("beside", ["detokenizer", "scheduler", "engine"])
async def test_a_stream_outlives_a_gateway_and_a_stage_that_dies_with_it(
    server: Server, http: aiohttp.ClientSession, beside: str
) -> None:
    path, body = FORMS["/v1/chat/completions"]
    undisturbed = await whole(http, path, body)
    detached = {"x-pipeinfer-detached": "60"}
    with await asyncio.to_thread(held_engines, server) as engines:
        asked = asyncio.create_task(begun(http, path, body, 10, **detached))
        await asyncio.to_thread(engines.compute_until, asked.done)
        answer, got = await asked
        reading = asyncio.create_task(more(answer, 1 << 30))
        await kill(server, "gateway", beside, engines=engines)
    got += await reading
    one, other = await asyncio.gather(rest(http, got), rest(http, got))
    assert one == other, "resumed twice at once"
    assert data(got + one) == undisturbed


@pytest.mark.parametrize("forms", TOGETHER, ids=len)
async def test_streams_outlive_a_gateway_and_its_tokenizer(
    server: Server, http: aiohttp.ClientSession, forms: tuple[str, ...]
) -> None:
    """Detokenizers keep for the gateway what tokenizers know, and the new tokenizer learns it: so
    that the scheduler may die after it, and then all of them but the detokenizer."""
    streams = await streams_begun(http, forms)
    # What is computed again has the same ids, and log-probs that are rounded otherwise.
    between = [("scheduler",)] if "log-probs" not in forms else []
    for stages in (("gateway", "tokenizer"), *between, ("gateway", "tokenizer")):
        await kill(server, *stages)
        resumed = "gateway" in stages
        await asyncio.gather(*(each.resume() if resumed else each.read(10) for each in streams))
    await asyncio.gather(*(stream.read() for stream in streams))
    for form, stream in zip(forms, streams, strict=True):
        same_events(form, stream.got, stream.undisturbed)
    if between:  # a word of the end that died with the scheduler is missed for a minute
        assert await asyncio.to_thread(leftovers, server) == {}
    else:
        await settled(server)


async def test_plain_clients_get_an_error_that_they_can_retry_and_nothing_is_left(
    server: Server, http: aiohttp.ClientSession
) -> None:
    path, body = FORMS["/v1/chat/completions"]
    undisturbed = await whole(http, path, body)
    long = body | {"max_tokens": 1800}

    def both_came() -> bool:
        states = ("running", "waiting")
        return sum(server.metric(f"pipeinfer_requests_{at}") for at in states) == 2

    with await asyncio.to_thread(held_engines, server) as engines:
        waits = {"x-pipeinfer-reattach": "3"}
        asked = asyncio.create_task(begun(http, path, long, 5, **waits))
        await asyncio.to_thread(engines.compute_until, asked.done)
        answer, _ = await asked
        whole_answer = asyncio.create_task(
            http.post(path, json={**long, "stream": False, "stream_options": None})
        )
        await asyncio.to_thread(server.wait, both_came, "the scheduler has both")
        killed = asyncio.create_task(kill(server, "gateway", engines=engines))
        with pytest.raises(aiohttp.ClientError):
            while await answer.content.readany():
                continue
            raise AssertionError("an orderly end of half an answer")
        await killed
    with pytest.raises(aiohttp.ClientError):
        await whole_answer
    assert await whole(http, path, body) == undisturbed
    await settled(server)


async def test_background_responses_go_on_and_are_stored(
    server: Server, http: aiohttp.ClientSession
) -> None:
    asked = {"input": "What are the stages?", "background": True, "temperature": 0,
             "max_output_tokens": 300, "ignore_eos": True}  # fmt: skip

    async def made(**more: Any) -> str:
        async with http.post("/v1/responses", json=asked | more) as answer:
            return (await answer.json())["id"]

    async def found(name: str) -> dict[str, Any]:
        async with await known(http, f"/v1/responses/{name}") as answer:
            return await answer.json()

    async def ended(name: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while (response := await found(name))["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
        return response

    first = await ended(await made())
    for _ in range(TRIES):  # both may have ended before they are looked at
        running, unwanted = await made(), await made(max_output_tokens=1900)
        await kill(server, "gateway")
        assert await found(first["id"]) == {**first, "completed_at": (await found(first["id"]))[
            "completed_at"]}  # fmt: skip
        async with http.post(f"/v1/responses/{unwanted}/cancel", json={}) as answer:
            cancelled = await answer.json()
        if cancelled["status"] == "cancelled":
            break
        assert cancelled["usage"]["output_tokens"] == 1900
    assert cancelled["status"] == "cancelled"
    last = await ended(running)
    assert last["output"][0]["content"] == first["output"][0]["content"]
    async with http.get(f"/v1/responses/{running}?stream=true&starting_after=5") as answer:
        events = await answer.text()
    assert events.startswith(f"id: {running}/6\n") and '"sequence_number":6,' in events
    body = {"input": "And?", "previous_response_id": running, "max_output_tokens": 5}
    async with http.post("/v1/responses", json=body) as answer:
        assert answer.status == 200, "it was stored, though its gateway was killed"
    for name in (first["id"], running, unwanted):
        async with http.delete(f"/v1/responses/{name}") as answer:
            assert answer.status == 200
    await settled(server)


async def test_a_gateway_that_is_swapped_leaves_kept_answers_to_its_successor(
    server: Server, http: aiohttp.ClientSession
) -> None:
    """It waits for connections, not for what goes on without one."""
    asked = {"input": "count", "background": True, "max_output_tokens": 900, "seed": 3,
             "temperature": 0.8, "ignore_eos": True}  # fmt: skip
    names: list[str] = []
    for _ in range(2):
        async with http.post("/v1/responses", json=asked) as answer:
            names.append((await answer.json())["id"])
        if len(names) == 2:
            await asyncio.to_thread(swap, server, "gateway")
        async with asyncio.timeout(60):
            while True:
                async with await known(http, f"/v1/responses/{names[-1]}") as answer:
                    response = await answer.json()
                if response["status"] not in ("queued", "in_progress"):
                    break
                await asyncio.sleep(0.05)
        names[-1] = response["output"][0]["content"][0]["text"]
        assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 900)
    assert names[0] == names[1]


async def test_the_client_of_the_page_loses_no_event_to_a_killed_gateway(
    server: Server, http: aiohttp.ClientSession
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [source] = [block for block in blocks if "x-pipeinfer-stream" in block]
    module: dict[str, Any] = {}
    exec(source, module)
    path, body = FORMS["/v1/chat/completions"]
    undisturbed = await whole(http, path, body)
    got: list[bytes] = []
    killed: asyncio.Task[float] | None = None
    async for event in module["events"](server.url, body, KEY):
        got.append(b"data: " + RANDOM.sub(b"-", event.encode()))
        if len(got) == 20:
            killed = asyncio.create_task(kill(server, "gateway"))
    assert killed is not None and await killed
    assert got == undisturbed
    assert b'"completion_tokens":400' in undisturbed[-2]

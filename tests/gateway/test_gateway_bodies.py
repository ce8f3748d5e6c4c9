"""Bodies: bounded in memory, scanned before they are decoded, and decoded strictly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from gateway_pipeline import Gateway, StartGateway
from hypothesis import example, given
from hypothesis import strategies as st
from raw_http import RawClient

from pipeinfer.gateway import serving
from pipeinfer.gateway.anthropic import MessagesRequest
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import (
    SLICE_BYTES,
    ChatRequest,
    CompletionRequest,
    JsonLimitExceeded,
    JsonLimits,
    JsonPrescan,
    prescan,
)
from pipeinfer.gateway.serving import DECODED_AT_ONCE, BodyDecoder, decode
from waiting import until

LARGEST = 8 * DECODED_AT_ONCE
MOST = 9 * DECODED_AT_ONCE  # beyond what counts of none, which is half of SMALL

Answers = Callable[[bytes, int], Awaitable[tuple[int, asyncio.StreamWriter]]]


def body(size: int) -> bytes:
    """A request of so many bytes."""
    bare = b'{"prompt": ""}'
    return b'{"prompt": "%s"}' % (b"a" * (size - len(bare)))


@pytest.fixture
async def send(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Answers]:
    """send(body, bytes to send of it) -> (status, the open connection); 0 if none comes soon."""
    monkeypatch.setattr(serving, "MAX_BUFFERED", MOST)
    reading = serving.BodyReader(LARGEST)
    intake = BodyDecoder(reading, lambda names: None)

    async def handler(request: web.Request) -> web.Response:
        try:
            taken = await intake.read(request, CompletionRequest)
        except ApiError as error:
            return web.Response(status=error.status, body=error.body())
        return web.Response(text=json.dumps(len(taken.prompt)))

    app = web.Application()
    app.router.add_post("/", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    writers: list[asyncio.StreamWriter] = []

    async def one(content: bytes, sent: int) -> tuple[int, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        before = reading._buffered
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content))
        writer.write(content[:sent])
        await writer.drain()
        try:
            if sent < len(content):
                await until(lambda: reading._buffered == before + sent - serving.SMALL_BODY)
            async with asyncio.timeout(60 if sent == len(content) else 0.3):
                return int((await reader.readuntil(b"\r\n")).split()[1]), writer
        except TimeoutError:
            return 0, writer

    yield one
    for writer in writers:
        writer.close()
    await runner.cleanup()


async def test_large_bodies_that_hang_are_bounded_together_and_small_ones_pass(
    send: Answers,
) -> None:
    large, small = body(6 * DECODED_AT_ONCE), body(serving.SMALL_BODY)
    status, hanging = await send(large, 5 * DECODED_AT_ONCE)
    assert status == 0
    assert (await send(large, len(large)))[0] == 503, "4.5 and 5.5 are more than 9"
    assert (await send(body(4 * DECODED_AT_ONCE), 4 * DECODED_AT_ONCE))[0] == 200
    status, _ = await send(body(5 * DECODED_AT_ONCE), 5 * DECODED_AT_ONCE - 1)
    assert status == 0
    assert (await send(body(2 * DECODED_AT_ONCE), 2 * DECODED_AT_ONCE))[0] == 503
    assert (await send(small, len(small)))[0] == 200
    hanging.write(large[5 * DECODED_AT_ONCE :])
    hanging.close()
    async with asyncio.timeout(60):
        while (await send(body(2 * DECODED_AT_ONCE), 2 * DECODED_AT_ONCE))[0] != 200:
            await asyncio.sleep(0.01)


async def test_bodies_that_were_taken_or_refused_are_not_counted_any_more(send: Answers) -> None:
    for _ in range(5):
        assert (await send(body(LARGEST), LARGEST))[0] == 200
        broken = b"[" * LARGEST
        assert (await send(broken, LARGEST))[0] == 400


async def test_many_large_bodies_at_once_are_all_answered(send: Answers) -> None:
    answers = await asyncio.gather(
        *(send(body(3 * DECODED_AT_ONCE), 3 * DECODED_AT_ONCE) for _ in range(20))
    )
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 503} and statuses.count(200) >= 3


class Whole:
    """Bodies that are there; a request is its body."""

    @asynccontextmanager
    async def read(self, request: bytearray) -> AsyncIterator[bytearray]:
        yield request


async def test_a_large_body_does_not_wait_for_larger_ones_that_came_before() -> None:
    intake = BodyDecoder(cast(serving.BodyReader, Whole()), lambda names: None)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        request = cast(web.Request, bytearray(body(size)))
        taken = await intake.read(request, CompletionRequest)
        assert len(taken.prompt) > size - 100
        order.append(name)

    huge = [take(f"huge{n}", 20 * DECODED_AT_ONCE) for n in range(3)]
    await asyncio.gather(*huge, take("large", 2 * DECODED_AT_ONCE))
    assert order == ["large", "huge0", "huge1", "huge2"]


def read(kind, **fields):
    return decode(msgspec.json.encode(fields), kind, lambda _: None)


def test_every_place_takes_them() -> None:
    found = read(CompletionRequest, prompt=[[1.0, 2]], max_tokens=5.0, stop_token_ids=[7.0], seed=0)
    assert (found.prompt, found.max_tokens, found.stop_token_ids) == ([[1, 2]], 5, [7])
    assert all(type(n) is int for n in (*found.prompt[0], found.max_tokens, *found.stop_token_ids))
    thinking = {"type": "enabled", "budget_tokens": 64.0}
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9.0}
    found = read(MessagesRequest, **asked, thinking=thinking)
    assert found.thinking is not None and found.thinking.budget_tokens == 64


def test_other_numbers_stay_what_they_are() -> None:
    schema = {"type": "number", "minimum": 2.0}
    asked = {"messages": [{"role": "user", "content": "1.0"}], "n": 1.0, "temperature": 2.0}
    found = read(ChatRequest, **asked, json_schema=schema, logit_bias={"1": 3.0})
    assert found.n == 1 and type(found.temperature) is float
    assert found.json_schema == schema and type(found.json_schema["minimum"]) is float
    assert found.messages[0].content == "1.0" and found.logit_bias == {1: 3.0}


@pytest.mark.parametrize("value", [5.5, "5", "5.0", True, 1e300])
def test_what_is_no_whole_number_is_refused(value) -> None:
    with pytest.raises(ApiError) as caught:
        read(CompletionRequest, prompt="a", max_tokens=value, n=1.0)
    assert caught.value.param == "max_tokens"


def test_a_long_list_is_not_gone_through() -> None:
    with pytest.raises(ApiError) as caught:
        read(CompletionRequest, prompt=[1.0] * 20_000)
    assert caught.value.param == "prompt[0]"


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODY = json.dumps({"prompt": ""}).encode()  # refused as a request, once it was read


def head(length: int, *headers: str, expect: str = "100-continue") -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {length}",
             f"Expect: {expect}", *headers]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


async def answer(client: RawClient) -> bytes:
    """The next response's head, an interim one's too."""
    return await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 60)


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


WIDE = JsonLimits(depth=10**9, values=10**9, containers=10**9, members=10**9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=30,
)
# Texts that are mostly what the survey must tell apart.
BROKEN = st.lists(st.sampled_from(list(b'[]{},:"\\a1 \xff')), max_size=60).map(bytes)


def depth(value: Any) -> int:
    """Levels of lists and objects."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


def containers(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + sum(map(containers, inner))


def commas(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(len(value) - 1, 0) + sum(map(commas, inner))


def members(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    own, inner = (len(value), value.values()) if isinstance(value, dict) else (0, value)
    return own + sum(map(members, inner))


def in_pieces(body: bytes, cuts: list[int]) -> JsonPrescan:
    seen = JsonPrescan(WIDE)
    ends = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, end in pairwise(ends):
        seen.feed(body[start:end])
    return seen


def byte_by_byte(body: bytes) -> tuple[int, int, int, int]:
    """(depth, values, containers, members) by looking at one byte after the other."""
    level = deepest = opened = separators = colons = at = 0
    inside = False
    while at < len(body):
        byte = body[at : at + 1]
        if byte == b"\\" and body[at + 1 : at + 2] in (b"\\", b'"'):
            at += 2
            continue
        if byte == b'"':
            inside = not inside
        elif not inside:
            level += (byte in b"[{") - (byte in b"]}")
            opened += byte in b"[{"
            separators += byte == b","
            colons += byte == b":"
            deepest = max(deepest, level)
        at += 1
    return deepest, 1 + separators + opened, opened, colons


@given(JSON, st.booleans(), st.lists(st.integers(0, 10**6), max_size=12))
def test_a_survey_finds_what_the_built_value_has_wherever_it_is_cut(
    value: Any, plain: bool, cuts: list[int]
) -> None:
    body = json.dumps(value, ensure_ascii=plain).encode()
    seen = in_pieces(body, cuts)
    assert (seen.depth, seen.containers) == (depth(value), containers(value))
    assert seen.values == 1 + commas(value) + containers(value)
    assert seen.members == members(value)


@given(BROKEN, st.lists(st.integers(0, 10**6), max_size=12))
@example(b'["\\\\\\"]"', [3, 4, 5])
@example(b'"\\\\"[', [2])
def test_broken_text_is_surveyed_as_one_would_read_it(body: bytes, cuts: list[int]) -> None:
    seen = in_pieces(body, cuts)
    assert (seen.depth, seen.values, seen.containers, seen.members) == byte_by_byte(body)


SMALL = st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 5), st.integers(0, 6))


@given(BROKEN, SMALL, st.integers(1, 7))
def test_a_bound_holds_exactly_and_wherever_the_text_is_cut(
    body: bytes, bounds: tuple[int, int, int, int], size: int
) -> None:
    found = byte_by_byte(body)
    allowed = all(have <= most for have, most in zip(found, bounds, strict=True))
    seen = JsonPrescan(JsonLimits(*bounds))
    try:
        for start in range(0, len(body), size):
            seen.feed(body[start : start + size])
    except JsonLimitExceeded:
        assert not allowed
    else:
        assert allowed


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" * 100, "64 levels"),
        (b"[]," * 100_001, "100000 lists"),
        (b"1," * 10**6, "1000000 val"),
        (b'"a":1,' * 100_001, "100000 members"),
    ],
)
def test_what_was_exceeded_is_named(body: bytes, what: str) -> None:
    with pytest.raises(JsonLimitExceeded, match=what):
        list(prescan(body, JsonLimits()))


@pytest.mark.parametrize("unit", [b"a", b'"', b'"a",', b"[", b",", b":", b'\\"', b'{"a":"\\\\"},'])
def test_no_slice_holds_a_loop_for_long(unit: bytes) -> None:
    """Whatever the body is made of; 3 ms at most were measured. Of each slice the quickest of some
    tries counts: others use the machine, too."""
    body = unit * (2**22 // len(unit))
    quickest = [min(times) for times in zip(*(slice_seconds(body) for _ in range(4)), strict=True)]
    assert len(quickest) == len(body) // SLICE_BYTES - (len(body) % SLICE_BYTES == 0)
    assert max(quickest) < 0.02


def slice_seconds(body: bytes) -> list[float]:
    """Seconds of the processor that each slice of `body` took."""
    seconds, before = [], time.thread_time()
    for _ in prescan(body, WIDE):
        now = time.thread_time()
        seconds.append(now - before)
        before = now
    return seconds

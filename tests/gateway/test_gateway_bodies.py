"""Bodies that are under way are bounded in memory, and small ones never wait for large ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from aiohttp import web

from pipeinfer.gateway import serving
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import CompletionRequest
from pipeinfer.gateway.serving import DECODED_AT_ONCE, BodyDecoder

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
    intake = BodyDecoder(serving.BodyReader(LARGEST), lambda names: None)

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
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content))
        writer.write(content[:sent])
        await writer.drain()
        try:
            async with asyncio.timeout(30 if sent == len(content) else 0.3):
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
    async with asyncio.timeout(10):
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

"""The proxy between stages, with real sockets: what passes, what is refused, what comes late."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import pytest

from chaos.links import Link
from port_rows import port_row

LISTEN, GOAL = "127.0.0.2", "127.0.0.3"
BYTES = random.Random(0).randbytes(3_000_000)
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def through_a_link(story: Callable[[Link, asyncio.Queue[Pair]], Awaitable[None]]) -> None:
    """Tells `story` with a link, and the connections that come out of its other end."""

    async def told() -> None:
        port, arrived = port_row(1), asyncio.Queue[Pair]()
        link = Link(LISTEN, GOAL, port)
        goal = await asyncio.start_server(lambda *pair: arrived.put_nowait(pair), GOAL, port)
        await link.mend()
        try:
            async with asyncio.timeout(30):
                await story(link, arrived)
        finally:
            await link.cut()
            goal.close()

    asyncio.run(told())


def test_bytes_arrive_whole_and_in_order_both_ways_also_over_a_slow_link_and_a_held_one():
    async def story(link: Link, arrived: asyncio.Queue[Pair]) -> None:
        async def say(writer: asyncio.StreamWriter, words: bytes) -> None:
            writer.write(words)
            await writer.drain()
            writer.write_eof()

        here = await asyncio.open_connection(LISTEN, link.port)
        there = await arrived.get()
        says = [asyncio.create_task(say(w, b)) for w, b in ((here[1], BYTES), (there[1], b"back"))]
        begun = await there[0].readexactly(1000)
        await link.slow(0.001, 1e9)
        begun += await there[0].readexactly(500_000)
        await link.hold()
        await link.mend()
        assert begun + await there[0].read(-1) == BYTES
        assert await here[0].read(-1) == b"back"
        await asyncio.gather(*says)
        here[1].close()
        there[1].close()

    through_a_link(story)


def test_a_cut_link_drops_its_connections_refuses_new_ones_and_leads_again_when_mended():
    async def story(link: Link, arrived: asyncio.Queue[Pair]) -> None:
        here = await asyncio.open_connection(LISTEN, link.port)
        here[1].write(b"1")
        there = await arrived.get()
        assert await there[0].readexactly(1) == b"1"
        await link.cut()
        for reader, _ in (here, there):
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(LISTEN, link.port)
        await link.mend()
        _, writer = await asyncio.open_connection(LISTEN, link.port)
        writer.write(b"again")
        reader, back = await arrived.get()
        assert await reader.readexactly(5) == b"again"
        writer.close()
        back.close()

    through_a_link(story)


def test_a_held_link_keeps_what_comes_and_gives_it_when_it_is_mended():
    async def story(link: Link, arrived: asyncio.Queue[Pair]) -> None:
        _, writer = await asyncio.open_connection(LISTEN, link.port)
        reader, back = await arrived.get()
        await link.hold()
        writer.write(b"kept")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.2)
        await link.mend()
        assert await reader.readexactly(4) == b"kept"
        writer.close()
        back.close()

    through_a_link(story)


@pytest.mark.parametrize(("delay", "rate", "least"), [(0.2, 1e9, 0.2), (0.0, 100_000.0, 0.3)])
def test_a_slow_link_gives_its_bytes_late(delay: float, rate: float, least: float):
    async def story(link: Link, arrived: asyncio.Queue[Pair]) -> None:
        _, writer = await asyncio.open_connection(LISTEN, link.port)
        reader, back = await arrived.get()
        await link.slow(delay, rate)
        began = time.monotonic()
        writer.write(BYTES[:100_000])
        assert await reader.readexactly(100_000) == BYTES[:100_000]
        assert time.monotonic() - began >= least
        writer.close()
        back.close()

    through_a_link(story)


def test_who_is_led_to_nobody_is_dropped():
    async def story() -> None:
        link = Link(LISTEN, GOAL, port_row(1))
        await link.mend()
        reader, _ = await asyncio.open_connection(LISTEN, link.port)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(1), 10)
        await link.cut()

    asyncio.run(story())

"""Two stages over real sockets, and a link between them that is cut again and again."""

from __future__ import annotations

import asyncio

import zmq

from chaos.links import Link
from pipeinfer.bus.bus import Bus
from pipeinfer.core import Send
from pipeinfer.messages import Abort, Message
from pipeinfer.topology import Identity, StageEntry, Topology
from port_rows import port_row

LISTEN, GOAL = "127.0.0.2", "127.0.0.3"
TEXT = "x" * 2_000


async def test_nothing_is_lost_and_nothing_comes_twice_while_connections_are_cut():
    """A burst, a cut amid it, and so on; the last cut is behind the last frame."""
    port, count, heard = port_row(8), 4_000, asyncio.Queue[Message]()
    there = StageEntry("tokenizer", f"tcp://{LISTEN}:{port}", bind=GOAL)
    place = Topology((StageEntry("gateway", f"tcp://127.0.0.1:{port + 4}"), there))
    links = [Link(LISTEN, GOAL, port + at) for at in range(2)]
    with zmq.Context() as context:
        sender, receiver = (Bus(Identity(n), 1, place, context) for n in ("gateway", "tokenizer"))
        sender.bind()
        receiver.bind()
        sender.start(lambda *_: None)
        receiver.start(lambda _channel, _header, message: heard.put_nowait(message))
        for link in links:
            await link.mend()
        for number in range(count):
            sender.send(Send("requests", "tokenizer-0", Abort(f"r{number}", 1, TEXT)))
            if number % 800 == 799:
                await asyncio.sleep(0)
                await heard_some(heard, number // 3)
                await links[0].cut()
                await links[0].mend()
        async with asyncio.timeout(60):
            while heard.qsize() < count:
                await asyncio.sleep(0.01)
        came = [heard.get_nowait() for _ in range(heard.qsize())]
        assert came == [Abort(f"r{number}", 1, TEXT) for number in range(count)]
        assert sender.repeated_frames > 0, "a cut took nothing along, so nothing was tried"
        for link in links:
            await link.cut()
        sender.close()
        receiver.close()


async def heard_some(heard: asyncio.Queue[Message], many: int) -> None:
    """Until the receiver has so many."""
    async with asyncio.timeout(60):
        while heard.qsize() < many:
            await asyncio.sleep(0.001)

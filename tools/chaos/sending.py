"""How a case is sent: as one request, half-closed, slowly, or dropped on the way.

Each way takes a server's origin and the bytes, and gives the answer; `DROPPED` where the client
did not wait for one. Knows no case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from chaos import wire
from chaos.wire import Answer, Origin

Way = Callable[[Origin, bytes], Awaitable[Answer]]
DROPPED = Answer(0, {}, b"")
SIP = 0.1  # seconds between two pieces of a slow request
HELD = 0.05  # seconds that a connection lives which is then dropped


async def whole(origin: Origin, content: bytes, half_close: bool = False) -> Answer:
    """Everything at once, then the whole answer."""
    reader, writer = await wire.connect(origin)
    try:
        writer.write(content)
        if half_close:
            writer.write_eof()
        return await wire.answer(reader)
    finally:
        writer.close()


async def half_closed(origin: Origin, content: bytes) -> Answer:
    """The sending side ends before the answer, as with `nc -N` or shutdown(SHUT_WR)."""
    return await whole(origin, content, half_close=True)


async def slow(origin: Origin, content: bytes) -> Answer:
    """A byte at a time, ten a second."""
    reader, writer = await wire.connect(origin)
    try:
        for at in range(len(content)):
            writer.write(content[at : at + 1])
            await writer.drain()
            await asyncio.sleep(SIP)
        return await wire.answer(reader)
    finally:
        writer.close()


async def dropped(origin: Origin, content: bytes) -> Answer:
    """Sent, and left alone at once: nobody reads the answer."""
    _, writer = await wire.connect(origin)
    try:
        writer.write(content)
        await asyncio.sleep(HELD)
    finally:
        writer.transport.abort()
    return DROPPED


async def unread(origin: Origin, content: bytes) -> Answer:
    """Sent, and held open for a second without reading."""
    reader, writer = await wire.connect(origin)
    try:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(content)
        await asyncio.sleep(1.0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        return await wire.answer(reader)
    finally:
        writer.transport.abort()

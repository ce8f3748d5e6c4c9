"""HTTP/1.1 by hand: requests as bytes, several ways to send them, answers read from a socket.

For clients that must cost little, or that send what no library would: half-closed, slowly, or
dropped on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LONGEST_HEAD = 64 << 10


class Closed(ConnectionError):
    """The connection ended within an answer, or before it."""


class Failed(Exception):
    """An answer that is not what was hoped for."""


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Address:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        return cls(parts.hostname, parts.port)


@dataclass(frozen=True)
class Answer:
    """`headers`: with names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def request(
    path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, method: str = "POST"
) -> bytes:
    """A well-formed request; a Content-Length stands in it unless `headers` say how it is sent."""
    named = {"Host": "server", **(headers or {})}
    if body and "Transfer-Encoding" not in named:
        named = {"Content-Type": "application/json", "Content-Length": str(len(body)), **named}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A new connection."""
    return await asyncio.open_connection(address.host, address.port, limit=LONGEST_HEAD)


async def head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """(status, headers) of the answer that begins here, after any 100 Continue. Raises Closed."""
    while True:
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Closed(f"no answer: {error}") from None
        first, *lines = raw.decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
        if status >= 200:
            pairs = (line.partition(":") for line in lines if line)
            return status, {name.lower(): value.strip() for name, _, value in pairs}


async def answer(reader: asyncio.StreamReader) -> Answer:
    """The whole answer that begins here; one without a length lasts to the connection's end."""
    status, headers = await head(reader)
    try:
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in chunks(reader)])
        else:
            body = await reader.read()
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise Closed(f"within an answer of status {status}: {error}") from None
    return Answer(status, headers, body)


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The chunks of a chunked body, as they come. Raises IncompleteReadError."""
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:-2]


SendMethod = Callable[[Address, bytes], Awaitable[Answer]]
DROPPED = Answer(0, {}, b"")
SIP = 0.1  # seconds between two pieces of a slow request
HELD = 0.05  # seconds that a connection lives which is then dropped


async def whole(address: Address, content: bytes, half_close: bool = False) -> Answer:
    """Everything at once, then the whole answer."""
    reader, writer = await connect(address)
    try:
        writer.write(content)
        if half_close:
            writer.write_eof()
        return await answer(reader)
    finally:
        writer.close()


async def half_closed(address: Address, content: bytes) -> Answer:
    """The sending side ends before the answer, as with `nc -N` or shutdown(SHUT_WR)."""
    return await whole(address, content, half_close=True)


async def slow(address: Address, content: bytes) -> Answer:
    """A byte at a time, ten a second."""
    reader, writer = await connect(address)
    try:
        for at in range(len(content)):
            writer.write(content[at : at + 1])
            await writer.drain()
            await asyncio.sleep(SIP)
        return await answer(reader)
    finally:
        writer.close()


async def dropped(address: Address, content: bytes) -> Answer:
    """Sent, and left alone at once: nobody reads the answer."""
    _, writer = await connect(address)
    try:
        writer.write(content)
        await asyncio.sleep(HELD)
    finally:
        writer.transport.abort()
    return DROPPED


async def unread(address: Address, content: bytes) -> Answer:
    """Sent, and held open for a second without reading."""
    reader, writer = await connect(address)
    try:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(content)
        await asyncio.sleep(1.0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        return await answer(reader)
    finally:
        writer.transport.abort()

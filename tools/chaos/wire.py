"""HTTP/1.1 by hand: requests as bytes, answers read from a socket, well-formed or not.

For clients that must cost little, or that send what no library would. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LONGEST_HEAD = 64 << 10


class Closed(ConnectionError):
    """The connection ended within an answer, or before it."""


class Failed(Exception):
    """An answer that is not what was hoped for."""


@dataclass(frozen=True)
class Origin:
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
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


async def connect(origin: Origin) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A new connection."""
    return await asyncio.open_connection(origin.host, origin.port, limit=LONGEST_HEAD)


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

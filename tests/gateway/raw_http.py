"""HTTP as bytes on a socket, for clients that no library can play."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import gateway_pipeline


class RawClient:
    """One connection. What it sends and reads is said byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, gateway: gateway_pipeline.Gateway, **options: Any) -> RawClient:
        host, port = gateway.url.partition("://")[2].rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port), **options))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def half_close(self) -> None:
        """Sends no more, and reads on."""
        self.writer.write_eof()

    async def all(self, patience: float = 60.0) -> bytes:
        """Everything until the server closes."""
        return await asyncio.wait_for(self.reader.read(), patience)

    async def close(self) -> None:
        self.writer.close()


def post(body: Any, *headers: str, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    """A whole POST of JSON, or of bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + content


def answers(data: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """(status, headers, body) of the final responses in `data`; interim ones are left out."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        status = int(first.split()[1])
        if status < 200:
            continue
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while True:
                size, _, data = data.partition(b"\r\n")
                length = int(size, 16)
                body, data = body + data[:length], data[length + 2 :]
                if not length:
                    break
        else:
            length = int(headers.get("content-length", len(data)))
            body, data = data[:length], data[length:]
        found.append((status, headers, body))
    return found

"""One request and what came of it: the answer's text and end, or where its client left it.

Knows HTTP and the two shapes of an answer, whole and streamed; judges nothing.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from chaos import wire
from soak.mix import Asked

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PATIENCE = 120.0  # seconds for an answer
INVITED = b"HTTP/1.1 100"
LEAVE = 0.03  # seconds at most after which a client leaves that has sent everything


@dataclass(frozen=True)
class Answer:
    """`status`: 0 where the client left before it. `finish`: of a completion; "" where it left
    within it, or where there is none. `code`: of an error."""

    status: int
    text: str = ""
    finish: str = ""
    code: str = ""


class Lines:
    """Connections to a server, used again where both sides like."""

    def __init__(self, origin: wire.Origin) -> None:
        self.origin = origin
        self._idle: list[Stream] = []

    async def ask(self, asked: Asked) -> Answer:
        """Sends it, and goes as far as its client wants. OSError, TimeoutError, or
        asyncio.IncompleteReadError if the server does not."""
        async with asyncio.timeout(PATIENCE):
            if asked.case is not None:
                answer = await asked.case.send(self.origin, asked.content)
                return _whole(answer) if answer.status else Answer(0)
            if asked.kind == "hang up":
                return await self._hung_up(asked)
            return await self._to_its_end(asked)

    def close(self) -> None:
        """Those that nobody uses."""
        for _, writer in self._idle:
            writer.close()

    async def _to_its_end(self, asked: Asked) -> Answer:
        reader, writer = self._idle.pop() if self._idle else await wire.connect(self.origin)
        again = False
        try:
            writer.write(asked.content)
            status, headers = await wire.head(reader)
            if headers.get("content-type", "").startswith("text/event-stream"):
                data = b"".join([chunk async for chunk in wire.chunks(reader)])
                found = _streamed(status, data)
            else:
                body = await reader.readexactly(int(headers["content-length"]))
                found = _whole(wire.Answer(status, headers, body))
            again = asked.kept and headers.get("connection") != "close"
            return found
        finally:
            if again:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _hung_up(self, asked: Asked) -> Answer:
        """Leaves after `hold` pieces of a stream; or, once the server has asked for the body and
        so has counted the request, some moments after it was sent."""
        reader, writer = await wire.connect(self.origin)
        try:
            if asked.hold:
                writer.write(asked.content)
                status, _ = await wire.head(reader)
                pieces = wire.chunks(reader)
                for _ in range(asked.hold):
                    await anext(pieces)
                return Answer(status)
            head, _, body = asked.content.partition(b"\r\n\r\n")
            writer.write(head + b"\r\n\r\n")
            invited = await reader.readuntil(b"\r\n\r\n")
            if not invited.startswith(INVITED):
                raise wire.Closed(f"no invitation: {invited[:80]!r}")
            writer.write(body)
            await asyncio.sleep(LEAVE * (len(body) % 8) / 7)
            return Answer(0)
        finally:
            if len(asked.content) % 2:
                writer.close()
            else:
                writer.transport.abort()  # with a reset instead of an orderly end


def _whole(answer: wire.Answer) -> Answer:
    content: Any = json.loads(answer.body)
    if "error" in content:
        return Answer(answer.status, code=str(content["error"]["code"]))
    if "choices" not in content:  # /health, in one of the malformed requests
        return Answer(answer.status)
    [choice] = content["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(answer.status, text, choice["finish_reason"])


def _streamed(status: int, data: bytes) -> Answer:
    """ConnectionError for a stream that does not end as one should."""
    if not data.endswith(b"data: [DONE]\n\n"):
        raise ConnectionError(f"a stream ended with {data[-200:]!r}")
    text, finish = "", ""
    for event in data.split(b"\n\n"):
        if event.startswith(b"data: {"):
            content = json.loads(event[len(b"data: ") :])
            for choice in content["choices"]:
                piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                text += piece or ""
                finish = choice["finish_reason"] or finish
    return Answer(status, text, finish)

"""A client of /v1/completions that notes when each piece of a stream comes.

Knows HTTP and server-sent events; asks for token counts and ignores what the text says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from bench.latency import Timeline

DATA, DONE = b"data: ", b"data: [DONE]"
NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_read=600)


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    """What is read of a piece; the last one has no choices."""

    choices: list[Any] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def session() -> aiohttp.ClientSession:
    """Without a limit on connections or on the time of an answer."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=NO_LIMIT)


async def stream(
    client: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    tokens: int,
    due: float,
    temperature: float = 0.0,
) -> Timeline:
    """One request of `tokens` output tokens; what goes wrong is in `error`.

    The clock is time.perf_counter().
    """
    line = Timeline(due, prompt=len(prompt))
    body = {
        "model": None, "prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True,
        "temperature": temperature, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    try:
        async with client.post(f"{url}/v1/completions", data=msgspec.json.encode(body)) as answer:
            if answer.status != 200:
                line.error = f"{answer.status}: {(await answer.text())[:200]}"
                return line
            async for raw in answer.content:
                if raw.startswith(DATA) and not raw.startswith(DONE):
                    _note(line, raw)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        line.error = f"{type(error).__name__}: {error}"
    if not line.error and line.tokens != tokens:
        line.error = f"{line.tokens} tokens instead of {tokens}"
    return line


def _note(line: Timeline, raw: bytes) -> None:
    now = time.perf_counter()
    try:
        chunk = _decode(raw[len(DATA) :])
    except (msgspec.DecodeError, msgspec.ValidationError):
        line.error = raw.decode(errors="replace")[:200]  # e.g. an error in the middle of a stream
        return
    if chunk.choices:
        line.pieces.append(now)
    if chunk.usage is not None:
        line.tokens = chunk.usage.completion_tokens

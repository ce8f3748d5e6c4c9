"""A client of streamed completions that notes when each piece of a stream comes.

Knows HTTP and server-sent events; asks for token counts and ignores what the text says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from pipeinfer.bench.endpoint import EncodedRequest, Endpoint
from pipeinfer.bench.latency import RequestTiming
from pipeinfer.bench.prompts import SampleRequest
from pipeinfer.json_values import JsonValue

DATA, DONE = b"data:", b"[DONE]"
OTHER_FIELDS = (b"event:", b"id:", b"retry:", b":")  # of server-sent events
SILENCE = 600.0  # seconds without a byte after which an answer counts as lost
KEPT = 2.0  # seconds that a connection is kept for the next request: servers close theirs after 5
SHOWN = 200  # letters of an error
TIMEOUT, CUT, GARBAGE, REFUSED = "timeout", "cut stream", "garbage", "no connection"
SAID, SHORT, EMPTY = "error in stream", "wrong length", "no tokens"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: JsonValue = None
    function_call: JsonValue = None


class _Choice(msgspec.Struct):
    """A token may have no text of its own yet. What opens a chat's stream, its role, is none."""

    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_token(self) -> bool:
        said = self.delta
        if said is None:
            return bool(self.text) or self.finish_reason is None
        if said.content or said.reasoning_content or said.reasoning:
            return True
        if said.tool_calls or said.function_call:
            return True
        return said.role is None and self.finish_reason is None


class _Chunk(msgspec.Struct):
    """What is read of a piece; the last one has no choices."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: JsonValue = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Failed(Exception):
    """A stream that cannot go on: the kind of failure, and what was said."""


def session(endpoint: Endpoint) -> aiohttp.ClientSession:
    """Without a limit on connections; on the time of an answer as the endpoint says."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT),
        timeout=aiohttp.ClientTimeout(total=endpoint.timeout or None, sock_read=SILENCE),
        headers=endpoint.headers,
    )


async def stream_request(
    client: aiohttp.ClientSession, endpoint: Endpoint, asked: EncodedRequest, due: float
) -> RequestTiming:
    """One request; what goes wrong is in `error` and `failure`. The clock is perf_counter()."""
    line = RequestTiming(due, prompt_tokens=asked.prompt_len, max_tokens=asked.output_len)
    await stream_into(client, endpoint, asked, line)
    return line


async def stream_all(endpoint: Endpoint, requests: Sequence[SampleRequest]) -> list[RequestTiming]:
    """All of them at once, by this process."""
    async with session(endpoint) as client:
        now = time.perf_counter()
        asked = [endpoint.encode(request) for request in requests]
        return list(
            await asyncio.gather(*(stream_request(client, endpoint, one, now) for one in asked))
        )


async def stream_into(
    client: aiohttp.ClientSession, endpoint: Endpoint, asked: EncodedRequest, line: RequestTiming
) -> None:
    """The same into a timeline that somebody looks at meanwhile."""
    line.sent = time.perf_counter()
    try:
        async with client.post(endpoint.api_url, data=asked.body) as answer:
            if answer.status != 200:
                text = (await answer.content.read(4096)).decode(errors="replace")
                raise _Failed(f"status {answer.status}", text)
            await _read_stream(answer, line)
    except _Failed as failed:
        line.failure, line.error = failed.args[0], failed.args[1][:SHOWN]
    except TimeoutError as error:
        line.failure, line.error = TIMEOUT, f"no answer in time {error}".rstrip()
    except aiohttp.ClientConnectorError as error:
        line.failure, line.error = REFUSED, str(error)[:SHOWN]
    except (aiohttp.ClientError, OSError) as error:
        line.failure, line.error = CUT, f"{type(error).__name__}: {error}"[:SHOWN]
    except ValueError as error:  # a line that is longer than any piece
        line.failure, line.error = GARBAGE, str(error)[:SHOWN]
    if line.failure and not line.error:
        line.error = line.failure
    if not line.error and endpoint.exact_length and line.output_tokens != asked.output_len:
        line.failure, line.error = (
            SHORT,
            f"{line.output_tokens} tokens instead of {asked.output_len}",
        )


async def _read_stream(answer: aiohttp.ClientResponse, line: RequestTiming) -> None:
    """The pieces of a stream. A server ends it with a reason, with [DONE], or both."""
    ended = False
    async for raw in answer.content:
        now = time.perf_counter()
        if raw.startswith(DATA):
            data = raw[len(DATA) :].strip()
            ended = data == DONE or _read_chunk(line, data, now) or ended
        elif raw.strip() and not raw.startswith(OTHER_FIELDS):
            raise _Failed(GARBAGE, f"no event of a stream: {_shown(raw)}")
    if not ended:
        raise _Failed(CUT, f"it ended after {len(line.chunk_times)} pieces without saying so")
    if not line.chunk_times:
        raise _Failed(EMPTY, "an answer without any token")
    if not line.has_usage:
        line.output_tokens = len(line.chunk_times)


def _read_chunk(line: RequestTiming, data: bytes, now: float) -> bool:
    """Whether it was the last piece with text."""
    try:
        chunk = _decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise _Failed(GARBAGE, f"{error}: {_shown(data)}") from None
    if chunk.error is not None:
        raise _Failed(SAID, _shown(msgspec.json.encode(chunk.error)))
    finished = False
    if chunk.choices:
        line.end = now
        finished = any(choice.finish_reason is not None for choice in chunk.choices)
        if any(choice.has_token() for choice in chunk.choices) or (
            finished and not line.chunk_times
        ):
            line.chunk_times.append(now)
    if chunk.usage is not None:
        line.has_usage, line.output_tokens = True, chunk.usage.completion_tokens
        line.prompt_tokens = chunk.usage.prompt_tokens or line.prompt_tokens
        details = chunk.usage.prompt_tokens_details
        line.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
    return finished


def _shown(raw: bytes) -> str:
    return raw.decode(errors="replace").strip()[:SHOWN]

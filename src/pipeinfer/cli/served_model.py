"""A model that a running server serves: pipeinfer's, or any other with OpenAI's API.

Knows HTTP and server-sent events. `servers_of` finds the servers of this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import msgspec

from pipeinfer import settings as config
from pipeinfer.cli.chat_model import (
    AnswerDelta,
    AnswerOptions,
    ModelFlags,
    Question,
    RequestFailed,
)
from pipeinfer.gguf.header import absolute
from pipeinfer.params import JsonObject, JsonValue
from pipeinfer.runtime.servers import RunningServer, ServerInfo, running_servers
from pipeinfer.settings import ConfigurationError, base_url, without_password

DATA, DONE, EVENT_ID = b"data:", b"[DONE]", b"id:"
# A server of pipeinfer keeps the answer for so many seconds where the connection is lost.
REATTACH, REATTACH_SECONDS = "x-pipeinfer-reattach", 30.0
STREAM_ID = "x-pipeinfer-stream"
RESUME_SECONDS = 0.2  # seconds between two attempts to go on with an answer
CONNECT_TIMEOUT = 10.0  # seconds
POLL_SECONDS = 0.2  # seconds between two looks at a server that starts
MAX_CONCURRENT = 64  # requests that are sent to a server at a time
MAX_LINE_BYTES = 1 << 24  # bytes of a line of a stream
MAX_ERROR_CHARS = 300  # characters of an error that is no JSON


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: JsonValue = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Ready(msgspec.Struct):
    reason: str = ""


class ServedModel:
    """`name`: as the server calls it, once it is started."""

    def __init__(
        self,
        flags: ModelFlags,
        answer_options: AnswerOptions,
        url: str,
        model: str = "",
        pid: int = 0,
    ) -> None:
        """A model behind the server at `url`. Raises ConfigurationError for a URL or a key that no
        request can have.

        - url: with or without /v1
        - model: "" for MODEL, or else the first that the server names
        - pid: of a server on this host, which may still start
        """
        self._url = base_url(url)
        self._shown = without_password(self._url)
        self.name = model or flags.model or self._shown
        self._pid = pid
        self._model = model or flags.model
        self._startup_status = "asking the server"
        settings = config.build({**config.from_environment(os.environ), **flags.settings})
        limit = (
            {} if answer_options.max_tokens is None else {"max_tokens": answer_options.max_tokens}
        )
        seed = {"seed": settings.seed} if "seed" in flags.settings else {}
        ids = {"return_token_ids": True} if answer_options.token_ids else {}
        self._fields: JsonObject = {**limit, **flags.sampling, **seed, **ids, "stream": True}
        key = settings.api_key
        if not key.isprintable():  # as of a file whose last line end came along
            raise ConfigurationError("--api-key: the key has a line end or another control letter")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONCURRENT),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            headers=self._headers,
            read_bufsize=MAX_LINE_BYTES,
        )
        if self._pid:
            await self._until_ready(self._client)
        if not self._model:
            self._model = self.name = await self._first_model(self._client)

    def startup_status(self) -> str:
        return self._startup_status

    async def answer(self, question: Question) -> AsyncGenerator[AnswerDelta, None]:
        assert self._client is not None
        chat = not isinstance(question, str)
        path = "chat/completions" if chat else "completions"
        prompt = {"messages": question} if chat else {"prompt": question}
        body = {"model": self._model, **prompt, **self._fields}
        place = _Place()
        try:
            while not place.ended:
                try:
                    async with await self._ask(self._client, path, body, place) as answer:
                        async for piece in _text_deltas(answer, place):
                            yield piece
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                    if isinstance(error, ValueError) or not place.may_resume():
                        raise self._broken(error) from None
                    await asyncio.sleep(RESUME_SECONDS)
        finally:
            if place.stream and not place.ended:
                await self._end(self._client, place.stream)

    async def _ask(
        self, client: aiohttp.ClientSession, path: str, body: JsonObject, place: _Place
    ) -> aiohttp.ClientResponse:
        """The answer, or the rest of it behind the last event that came. RequestFailed."""
        resumed = bool(place.stream)
        if resumed:
            headers = {"Last-Event-ID": place.event} if place.event else {}
            answer = await client.get(f"{self._url}/v1/streams/{place.stream}", headers=headers)
        else:
            headers = {REATTACH: f"{REATTACH_SECONDS:g}"}
            answer = await client.post(f"{self._url}/v1/{path}", json=body, headers=headers)
        if answer.status == 503 and resumed:
            answer.close()
            raise aiohttp.ClientPayloadError("the server starts")
        try:
            await self._check(answer)
        except BaseException:
            answer.close()
            raise
        place.stream = answer.headers.get(STREAM_ID, place.stream)
        return answer

    async def _end(self, client: aiohttp.ClientSession, stream: str) -> None:
        """Deletes the stream, whose reader has left: the server need not wait for another
        reader."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT)
            async with client.delete(f"{self._url}/v1/streams/{stream}", timeout=timeout):
                return

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _until_ready(self, client: aiohttp.ClientSession) -> None:
        """A server that was just started does not listen yet, or answers 503."""
        while True:
            try:
                async with client.get(f"{self._url}/health/ready") as answer:
                    if answer.status == 200:
                        return
                    ready = msgspec.json.decode(await answer.read(), type=_Ready)
                    self._startup_status = f"the server starts: {ready.reason}"
            except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
                self._startup_status = "the server starts"
                if all(one.pid != self._pid for one in running_servers()):
                    raise self._broken(error) from None
            await asyncio.sleep(POLL_SECONDS)

    async def _first_model(self, client: aiohttp.ClientSession) -> str:
        try:
            async with client.get(f"{self._url}/v1/models") as answer:
                await self._check(answer)
                models = msgspec.json.decode(await answer.read(), type=_Models).data
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise self._broken(error) from None
        if not models:
            raise RequestFailed(f"{self._shown} serves no model")
        return models[0].id

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        """RequestFailed for what the server refuses."""
        if answer.status == 200:
            return
        text = await answer.text(errors="replace")
        hint = "; give its key by --api-key" if answer.status == 401 else ""
        raise RequestFailed(f"{_message(text)} (status {answer.status} of {self._shown}{hint})")

    def _broken(self, error: Exception) -> RequestFailed:
        if isinstance(error, msgspec.DecodeError):
            return RequestFailed(f"{self._shown} answers what is none of OpenAI's API: {error}")
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno
            why = os.strerror(number) if number and number > 0 else str(error.os_error)
            return RequestFailed(f"{self._shown}: nobody answers there ({why})")
        return RequestFailed(f"{self._shown}: {str(error) or type(error).__name__}")


class _Place:
    """How far a stream was read.

    Attributes:
    - stream: its id; "" if the server has sent none, so that it cannot be resumed
    - event: id of the last event that came; "" before the first one
    - ended: it came to its end
    """

    def __init__(self) -> None:
        self.stream = self.event = ""
        self.ended = False
        self._lost_at = 0.0

    def on_event(self, event: str) -> None:
        """Counts an event that has come."""
        self.event, self._lost_at = event, 0.0

    def may_resume(self) -> bool:
        """Whether a connection that broke now is worth another one."""
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        return bool(self.stream) and now - self._lost_at < REATTACH_SECONDS


async def _text_deltas(
    answer: aiohttp.ClientResponse, place: _Place
) -> AsyncGenerator[AnswerDelta, None]:
    """Until the stream says that it has ended. RequestFailed if it does not, or on an error."""
    ended, event = False, ""
    async for line in answer.content:
        if line.startswith(EVENT_ID):
            event = line.removeprefix(EVENT_ID).strip().decode(errors="replace")
        if not line.startswith(DATA):
            continue
        data = line.removeprefix(DATA).strip()
        if data == DONE:
            place.ended = True
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
        place.on_event(event)
        if chunk.error is not None:
            place.ended = True
            raise RequestFailed(_message(data.decode(errors="replace")))
        for choice in chunk.choices:
            ended = ended or choice.finish_reason is not None
            message = choice.delta or _Message(content=choice.text)
            reasoning = message.reasoning_content or message.reasoning
            ids = choice.token_ids or []
            if reasoning:
                yield AnswerDelta(reasoning, ids, reasoning=True)
                ids = []
            yield AnswerDelta(message.content or "", ids, False, choice.finish_reason)
    if not ended and place.event:
        raise aiohttp.ClientPayloadError("the answer broke off")
    if not ended:
        raise RequestFailed("the answer broke off")
    place.ended = True


def _message(text: str) -> str:
    """The message of an error in OpenAI's form; the text itself if it has another form."""
    try:
        decoded = msgspec.json.decode(text, type=dict[str, JsonValue])
    except msgspec.DecodeError:
        return " ".join(text.split())[:MAX_ERROR_CHARS] or "no reason given"
    error = decoded.get("error", decoded)
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())


def servers_of(model: str = "") -> list[tuple[RunningServer, ServerInfo]]:
    """The servers of this user on this host that serve `model`, by its name there or by its folder
    or file, the newest first; without `model` all. The folder of a GGUF file is that file's too.

    A server that is reached by https alone is none: its certificate names it otherwise.
    """
    servers = [(one, one.served) for one in reversed(running_servers()) if one.served is not None]
    given = Path(os.path.expanduser(model))  # noqa: PTH111 (no user need be called so)
    # A GGUF file is served under its own name, also where that is a link, as in the hub's cache.
    paths = {os.path.realpath(given), str(absolute(given))}
    return [
        (server, served)
        for server, served in servers
        if served.url.startswith("http:")
        and (not model or model == served.model or paths & _paths(served))
    ]


def _paths(served: ServerInfo) -> set[str]:
    """Paths that name the served folder or file."""
    file = Path(served.path)
    alone = file.suffix.lower() == ".gguf" and not (file.parent / "config.json").exists()
    return {served.path, str(file.parent)} if alone else {served.path}

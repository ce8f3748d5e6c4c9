"""Requests for what another gateway of this host keeps.

Gateways of a host share the port, so a client that comes back for its stream, or its response, may
reach another gateway than the one that has it. The others are asked over sockets of their own, as
the client has asked, and the answer of the one that has it is passed on as it comes: keys, owners
and errors are its business.
The sockets are in Linux's abstract namespace: no file is left of a killed gateway, and another
container does not reach them. What they serve is what the port serves, to processes of the same
user; whoever else has taken such a name gets no request, since requests have keys.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from hashlib import blake2b

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler

from pipeinfer.gateway.connections import PROBE, Acceptor, Connections
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.health import Health
from pipeinfer.gateway.resumable_answers import EVENT_END, write_comment
from pipeinfer.processes import peer_of

log = logging.getLogger(__name__)

FORWARDED = "x-pipeinfer-forwarded"  # of a request that another gateway passes on: the gateway's id
RETRY_SECONDS = 0.5  # until the socket of a gateway that is about to end is tried again
ANSWER_SECONDS = 30.0  # until an answer begins; a gateway that hangs counts as lost before that
BACKLOG = 128  # connections that wait to be accepted
# Answers from which it does not follow that the gateway lacks the stream: 503 while it starts, 401
# before it has read the keys again, of which the asking gateway knows the client's already.
DOES_NOT_SAY = (401, 503)
# Headers of a request that the handlers and what is before them read.
ASKED_WITH = ("host", "origin", "authorization", "x-api-key", "last-event-id", "x-request-id")
# Headers of an answer that concern one connection, and those that this gateway adds itself.
NOT_PASSED_ON = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")
)


def socket_name(address: str) -> str:
    """The name of the socket of the gateway whose stage has that address: one in the abstract
    namespace, as different as the addresses of the stages of a host are."""
    return "\0pipeinfer-" + blake2b(address.encode(), digest_size=16).hexdigest()


class Siblings:
    """The other gateways of this host.

    stage, address: of this one. others: addresses by id. health: who is there. first: whether this
    one is the first of the gateways, which says for all that the server is ready.
    """

    def __init__(
        self, stage: str, address: str, others: Mapping[str, str], health: Health, *, first: bool
    ) -> None:
        self._stage, self._address = stage, address
        self._others, self._health = others, health
        self.first = first
        self._acceptor: Acceptor | None = None
        self._listening: asyncio.Task[None] | None = None

    def listen(self, connections: Connections) -> None:
        """Serves the other gateways from now on, if there are any."""
        if self._others:
            self._listening = asyncio.create_task(self._listen(connections))

    def close(self) -> None:
        """Serves them no more."""
        if self._listening is not None:
            self._listening.cancel()
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def connections(self) -> list[float]:
        """How many the others that are ready had each, as they said last."""
        rows = [self._health.stages[stage] for stage in self._others]
        return [row.stats.get("connections", 0.0) for row in rows if row.state == "ready"]

    async def forward(self, request: web.Request) -> web.StreamResponse | None:
        """The answer of the gateway that has what `request` asks for; None if none has. Its body,
        which such requests do not need, is not passed on. All are asked at once, so one that hangs
        or is being started delays no other. Raises ApiError 503 if none has it and one of them does
        not say."""
        if is_forwarded(request):
            return None
        stages = self._health.stages
        asked = [at for stage, at in self._others.items() if stages[stage].state != "lost"]
        silent = len(self._others) - len(asked)
        async with AsyncExitStack() as stack:
            asks: list[asyncio.Task[aiohttp.ClientResponse | None]] = []
            for address in asked:
                connector = _AbstractConnector(socket_name(address))
                timeout = aiohttp.ClientTimeout(total=None)
                session = aiohttp.ClientSession(connector=connector, timeout=timeout)
                await stack.enter_async_context(session)
                asks.append(asyncio.create_task(self._ask(request, session)))
            stack.push_async_callback(_drop, asks)
            for ask in asyncio.as_completed(asks):
                answer = await ask
                if answer is None or answer.status in DOES_NOT_SAY:
                    silent += 1
                elif answer.status != 404:
                    await _drop(asks, answer)
                    return await _pass_on(request, answer)
        if silent:
            message = "a gateway that may have it does not answer"
            raise ApiError(503, message, code="starting", retry_after=1)
        return None

    async def _ask(
        self, request: web.Request, session: aiohttp.ClientSession
    ) -> aiohttp.ClientResponse | None:
        """What that gateway says; None if it was killed, or hangs."""
        given = {header: request.headers.get(header, "") for header in ASKED_WITH}
        # Bytes that are no UTF-8 cannot be passed on, and must not be left out: they are wrong.
        headers = {h: v.encode(errors="replace").decode() for h, v in given.items() if v}
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await session.request(
                    request.method,
                    f"http://gateway{request.rel_url.raw_path_qs}",
                    headers=headers | {FORWARDED: self._stage},
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def _listen(self, connections: Connections) -> None:
        def accepted(link: socket.socket) -> None:
            if peer_of(link)[1] == os.geteuid():
                connections.accept(link, None)
            else:
                link.close()

        listener, name = socket.socket(socket.AF_UNIX), socket_name(self._address)
        listener.setblocking(False)
        try:
            while True:
                try:
                    listener.bind(name)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        log.error("other gateways cannot ask this one: %s", error)
                        return
                    await asyncio.sleep(RETRY_SECONDS)  # the process before this one has it still
            listener.listen(BACKLOG)
            self._acceptor = Acceptor(listener, accepted)
        finally:
            if self._acceptor is None:
                listener.close()


class _AbstractConnector(aiohttp.UnixConnector):
    """uvloop connects to no name of the abstract namespace, but takes a socket that has."""

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: object, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        found = socket.socket(socket.AF_UNIX)
        found.setblocking(False)
        try:
            found.connect(self.path)
            if peer_of(found)[1] != os.geteuid():
                raise ConnectionRefusedError(errno.ECONNREFUSED, "another user's process")
            _, protocol = await self._loop.create_unix_connection(self._factory, sock=found)
        except OSError:  # aiohttp makes a ClientOSError of it
            found.close()
            raise
        return protocol


def is_forwarded(request: web.Request) -> bool:
    """Whether another gateway passes `request` on, which has looked into what they share."""
    return FORWARDED in request.headers


async def _drop(
    asks: Sequence[asyncio.Task[aiohttp.ClientResponse | None]],
    but: aiohttp.ClientResponse | None = None,
) -> None:
    """Ends all connections but that of one answer, which may be a long one."""
    for ask in asks:
        ask.cancel()
    for found in await asyncio.gather(*asks, return_exceptions=True):
        if isinstance(found, aiohttp.ClientResponse) and found is not but:
            found.close()


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in NOT_PASSED_ON:
            response.headers.add(name, value)
    response.content_length = answer.content_length
    has_events = answer.content_type == "text/event-stream"
    between = has_events  # two events, as far as they were passed on

    def probe() -> None:
        if between:
            write_comment(request)

    with suppress(ConnectionResetError):  # the client has left
        await response.prepare(request)
        request[PROBE] = probe
        try:
            async for part in answer.content.iter_any():
                between = False
                await response.write(part)
                between = has_events and part.endswith(EVENT_END)
        except (aiohttp.ClientError, OSError):
            # No orderly end: the client must see that more was to come.
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
    return response

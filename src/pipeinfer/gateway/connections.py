"""HTTP connections: how many, how long they may wait, TLS handshakes, and clients that are gone.

Extends aiohttp's protocol where it would let one client harm others. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http import HttpVersion11

from pipeinfer.gateway.errors import ApiError, UnroutableResponse, error_response, http_error

# Seconds after a probe at which its effect is checked; after the last check the next probe is sent.
# The first is long enough for a client on this host, the second for one far away.
CHECK_DELAYS = (0.01, 0.05, 0.2, 1.0)
CLOSE_WAIT = 8  # of linux/tcp_states.h: the peer has stopped sending, and nothing else happened


def abort_when_peer_leaves(
    transport: asyncio.Transport, is_busy: Callable[[], bool], probe: Callable[[], None]
) -> None:
    """Aborts `transport` as soon as its peer is known to be gone, while `is_busy()`.

    A client that only stopped sending and one that is gone look the same at first: their data end.
    But the host of the latter answers all data with a reset, which shows in the socket's state.
    `probe()` sends something that the peer must ignore, where it can.
    """
    _PeerProbe(transport, is_busy, probe).send_probe()


class _PeerProbe:
    """Probes one transport. The loop's timer holds the only reference, so this ends with the last
    check."""

    def __init__(
        self, transport: asyncio.Transport, is_busy: Callable[[], bool], probe: Callable[[], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._is_busy = is_busy
        self._probe = probe

    def send_probe(self) -> None:
        """Sends a probe, then checks for its answer after each of CHECK_DELAYS."""
        if self._needed():
            self._probe()
            self._loop.call_later(CHECK_DELAYS[0], self._check, 0)

    def _check(self, number: int) -> None:
        if not self._needed():
            return
        if not only_half_closed(self._transport):
            self._transport.abort()
        elif number + 1 < len(CHECK_DELAYS):
            self._loop.call_later(
                CHECK_DELAYS[number + 1] - CHECK_DELAYS[number], self._check, number + 1
            )
        else:
            self.send_probe()

    def _needed(self) -> bool:
        return self._is_busy() and not self._transport.is_closing()


def only_half_closed(transport: asyncio.Transport) -> bool:
    """Whether the peer, which has stopped sending, may still receive.

    True on systems without TCP_INFO; there a write fails instead.
    """
    raw = transport.get_extra_info("socket")
    if raw is None or not hasattr(socket, "TCP_INFO"):
        return True
    return raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSE_WAIT


log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0  # seconds for a handshake
TLS_CLOSE_TIMEOUT = 5.0  # seconds for the client's part in the end of TLS
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
ACCEPT_RETRY = 1.0  # seconds until connections are accepted again after OUT_OF_FILES
ACCEPT_YIELD = 0.002  # seconds for which connections are left to other processes
ACCEPTED_IN_TURN = 8  # connections that are accepted in one turn of the loop
# Connections beside its share that a process has before it leaves new ones to others.
UNEVEN = 4


def has_more_than_its_share(own: int, others: Iterable[float]) -> bool:
    """Whether a process with `own` connections is to leave new ones to the `others`, who share the
    listener with it and had so many each when they said so last."""
    counts = [own, *others]
    return own > sum(counts) / len(counts) + UNEVEN


class Acceptor:
    """Accepts connections from `listener` and passes each socket to `accepted`, until closed.

    An event loop's own server shows a TLS connection only after its handshake; here it counts as
    soon as it is accepted. And an event loop accepts all that waits: of processes that share the
    listener, whichever wakes first would get all.

    yields(): whether others that share the listener are to accept first, for ACCEPT_YIELD.
    """

    def __init__(
        self,
        listener: socket.socket,
        accepted: Callable[[socket.socket], None],
        yields: Callable[[], bool] = lambda: False,
    ) -> None:
        self._listener = listener
        self._accepted = accepted
        self._yields = yields
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._listen()

    def close(self) -> None:
        """Accepts no more; pending connections are left to other processes with the socket."""
        self._open = False
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _listen(self) -> None:
        if self._open:
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        """Else the loop would call `_accept` again at once."""
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, then)

    def _accept_what_is_left(self) -> None:
        if self._open:
            self._accept_up_to(ACCEPTED_IN_TURN)
            self._listen()

    def _accept(self) -> None:
        if self._yields():
            self._pause(ACCEPT_YIELD, self._accept_what_is_left)
        else:
            self._accept_up_to(ACCEPTED_IN_TURN)

    def _accept_up_to(self, count: int) -> None:
        for _ in range(count):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in OUT_OF_FILES:
                    raise
                log.error("cannot accept a connection: %s", error.strerror)
                self._pause(ACCEPT_RETRY, self._listen)
                return
            accepted.setblocking(False)
            self._accepted(accepted)


class Handshake:
    """The TLS handshake of one accepted socket. head_since: see CountedConnection."""

    def __init__(self, accepted: socket.socket) -> None:
        self.head_since: float | None = None
        self._accepted = accepted

    async def run(self, context: ssl.SSLContext, make: Callable[[], asyncio.Protocol]) -> None:
        """Returns after the handshake. Then `make()` has made the connection's protocol, or the
        handshake failed and the socket is closed."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                make,
                self._accepted,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT,
                ssl_shutdown_timeout=TLS_CLOSE_TIMEOUT,
            )

    def evict(self) -> None:
        """The transport, which owns the socket, finds its end and closes it."""
        with contextlib.suppress(OSError):
            self._accepted.shutdown(socket.SHUT_RDWR)


# Seconds without a request; load balancers keep connections for up to 600.
KEEP_ALIVE_TIMEOUT = 620.0
HEAD_TIMEOUT = 30.0  # seconds from the first byte of a request's head to its end
# Seconds for which a client may read nothing of what was sent, with its TCP window closed.
UNREAD_TIMEOUT = 300.0
# Seconds for which the rest of a refused body is received, so that its client reads the error.
LINGER_TIMEOUT = 10.0
SWEEP_INTERVAL = 5.0  # seconds between two checks of waiting connections
RESERVED_FILES = 256  # open files of a gateway beside connections
MAX_CONNECTIONS = 65_536  # connections, however many files may be open: some 30 KiB each
LEAST_CONNECTIONS = 16  # connections, however few files may be open
# A function that sends bytes which a client must ignore; set once the answer's headers are sent.
PROBE: web.RequestKey[Callable[[], None]] = web.RequestKey("probe")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # clients ignore it where they did not ask for it
TOO_MANY = ApiError(503, "too many connections", code="too_many_connections", retry_after=1)


def connection_limit() -> int:
    """Connections at most, so that files for everything else can still be opened."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(LEAST_CONNECTIONS, min(soft - RESERVED_FILES, MAX_CONNECTIONS))
    )


class CountedConnection(Protocol):
    """An open connection that counts against the limit.

    head_since: loop seconds when the first byte of an unfinished request head arrived, else None.
    """

    head_since: float | None

    def evict(self) -> None:
        """Ends the connection and frees its descriptor at once, for another connection."""
        ...


class Connections:
    """Makes a protocol for each connection, at most `max_open` at a time.

    One more connection takes the place of a waiting one: first of those that never had a request
    (TLS handshakes among them), then of the one that is idle for longest. If all are busy, the new
    one gets 503, or over TLS is closed.

    on_bad_request(): called for each request that is not HTTP.
    on_refused(): called for each connection beyond the bound.
    """

    def __init__(
        self,
        server: web.Server,
        max_open: int,
        on_bad_request: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        self.server = server
        self.on_bad_request = on_bad_request
        self._max_open = max_open
        self._on_refused = on_refused
        self._all: set[CountedConnection] = set()
        # Connections that wait for a request, and since when (loop seconds), oldest first.
        self._unused: dict[CountedConnection, float] = {}
        self._idle: dict[CountedConnection, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL, self._sweep)

    def __call__(self) -> Connection:
        return Connection(self, self._loop)

    def __len__(self) -> int:
        return len(self._all)

    def accept(self, accepted: socket.socket, context: ssl.SSLContext | None) -> None:
        """Serves an accepted socket, with a TLS `context` after its handshake."""
        if context is None:
            self._add_task(self._loop.create_task(self._connect(accepted)))
        else:
            self._accept_tls(accepted, context)

    async def _connect(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its client has left
            await self._loop.connect_accepted_socket(self, accepted)

    def _add_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _accept_tls(self, accepted: socket.socket, context: ssl.SSLContext) -> None:
        handshake = Handshake(accepted)
        if not self.register(handshake):
            accepted.close()  # no response can be sent before the handshake
            return

        def make() -> Connection:
            return Connection(self, self._loop, handshake)

        task = self._loop.create_task(handshake.run(context, make))
        self._add_task(task)
        task.add_done_callback(lambda _: self.unregister(handshake))

    def register(
        self, connection: CountedConnection, before: CountedConnection | None = None
    ) -> bool:
        """Counts a connection, in the place of `before` if given. False: there are too many."""
        if before is not None:
            self.unregister(before)
        if len(self._all) >= self._max_open:
            waiting = next(iter(self._unused or self._idle), None)
            self._on_refused()
            if waiting is None:
                return False
            waiting.evict()
            self.unregister(waiting)
        self._all.add(connection)
        self._unused[connection] = self._loop.time()
        return True

    def unregister(self, connection: CountedConnection) -> None:
        """The connection counts no more."""
        self._all.discard(connection)
        self.mark_busy(connection)

    def mark_busy(self, connection: CountedConnection) -> None:
        """A request has arrived on the connection."""
        self._unused.pop(connection, None)
        self._idle.pop(connection, None)

    def mark_idle(self, connection: CountedConnection) -> None:
        """The connection waits for its next request."""
        if connection in self._all:
            self._idle[connection] = self._loop.time()

    def stop(self) -> None:
        """Stops the sweep, and closes connections without a request; the server closes the
        others."""
        self._sweeper.cancel()
        for connection in list(self._unused):
            connection.evict()

    def _sweep(self) -> None:
        now = self._loop.time()
        for waiting in (self._unused, self._idle):
            for connection, since in list(waiting.items()):
                begun = connection.head_since
                if now - since > KEEP_ALIVE_TIMEOUT or (
                    begun is not None and now - begun > HEAD_TIMEOUT
                ):
                    connection.evict()
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL, self._sweep)


class Connection(web.RequestHandler):
    """An HTTP connection of a client. before: its TLS handshake, in whose place it counts.

    head_since: see CountedConnection.
    """

    def __init__(
        self,
        connections: Connections,
        loop: asyncio.AbstractEventLoop,
        before: CountedConnection | None = None,
    ) -> None:
        super().__init__(
            connections.server,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_TIMEOUT,
            lingering_time=LINGER_TIMEOUT,
            auto_decompress=False,
            access_log=None,  # type: ignore[arg-type]
        )
        self._connections = connections
        self._handshake = before
        self.head_since: float | None = None
        self._busy = False  # requests have come that are not answered
        self._flushing = False  # the last bytes of an answer are on their way
        self._half_closed = False
        self._is_tcp = False
        self._raw_transport: asyncio.Transport | None = None  # also while it closes
        self._last_message: tuple[Any, Any] | None = None  # the latest message and its body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self._raw_transport = self.transport
        before, self._handshake = self._handshake, None
        if not self._connections.register(self, before):
            self.transport.write(_raw_response(TOO_MANY))
            self.force_close()
            return
        raw = transport.get_extra_info("socket")
        if raw is None or raw.family == socket.AF_UNIX:
            return
        self._is_tcp = True
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_TIMEOUT * 1000))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.unregister(self)
        super().connection_lost(exc)
        self._raw_transport = None
        # Its body knows this connection, which shall end without a collector.
        self._last_message = None

    def evict(self) -> None:
        """Closes at once: TLS would wait for the client's part in its end, and every transport for
        a client to read what is left."""
        self.force_close()
        if self._raw_transport is not None:
            self._raw_transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages:
            newest = self._messages[-1]
            if self._last_message not in (None, newest) and not self._last_message[1].is_eof():
                # The parser gave up in the middle of a body, whose reader would wait for ever.
                self._last_message[1].set_exception(web.RequestPayloadError("malformed"))
            self._last_message = newest
            self._busy = True
            self.head_since = None
            self._connections.mark_busy(self)
        elif data and not self._busy and self.head_since is None:
            self.head_since = self._loop.time()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True keeps the connection, until what came is answered."""
        if self._half_closed:
            return True
        transport = self.transport
        if not self._answerable() or transport is None:
            return False
        self._half_closed = True
        abort_when_peer_leaves(transport, lambda: self._busy, self._probe)
        return True

    def _answerable(self) -> bool:
        """Whether a half-close is no end of the client, and all requests that it sent are complete.

        TLS has no half-close, other gateways do not use any, and HTTP/1.0 has nothing that could be
        sent before an answer: there the end of sending is the end of the client.
        """
        if not self._busy or self._last_message is None:
            return False
        if self.ssl_context is not None or not self._is_tcp:
            return False
        message, body = self._last_message
        unreadable = not hasattr(message, "version")
        return body.is_eof() and (unreadable or message.version >= HttpVersion11)

    def _probe(self) -> None:
        request, transport = self._current_request, self.transport
        if transport is None or self._flushing:
            return  # the bytes on their way are a probe, too
        probe = request.get(PROBE) if request is not None else None
        if probe is not None:
            probe()
        elif request is None or request.writer.output_size == 0:
            transport.write(CONTINUE)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # from outside of the application's middlewares
            resp = error_response(http_error(request, resp))
        if self._half_closed and not self._messages:
            resp.force_close()
        self._flushing = True
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._flushing = False
            if not self._messages:
                self._busy = False
                self._connections.mark_idle(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to a request that aiohttp cannot read: an error of the client."""
        if status >= 500:
            super().handle_error(request, status, exc, message)  # the log gets the traceback
            return UnroutableResponse.of(ApiError(status, "internal error"))
        self._report_bad_request(exc)
        if exc is not None:
            exc.__traceback__ = None  # its frames know `exc`, and with it this connection
        return UnroutableResponse.of(
            ApiError(status, f"no HTTP request: {_parser_error(exc)}", code="bad_request")
        )

    def log_exception(self, *args: object, **kw: object) -> None:
        exc = kw.get("exc_info")
        if isinstance(exc, web.RequestPayloadError):  # in a body whose handler has ended
            self._report_bad_request(exc)
        else:
            super().log_exception(*args, **kw)

    def _report_bad_request(self, exc: BaseException | None) -> None:
        self._connections.on_bad_request()
        peer = self.peername
        host = peer[0] if isinstance(peer, tuple) else peer
        log.info("bad request from %s: %s", host, _parser_error(exc))


def _parser_error(exc: BaseException | None) -> str:
    """The parser's message, unless it quotes what was sent: that may be a key."""
    words = str(getattr(exc, "message", "")).partition("\n")[0].rstrip(":")
    quotes = not words or "'" in words or '"' in words or len(words) > 80
    return type(exc).__name__ if quotes else words


def _raw_response(error: ApiError) -> bytes:
    """A whole response as bytes, for where there is no request."""
    body = error.body()
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {error.retry_after}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body

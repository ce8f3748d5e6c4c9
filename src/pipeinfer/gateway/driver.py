"""The gateway's I/O beside the bus: it listens for HTTP and joins the application to the core.

Knows when to accept connections, and the line that says "ready"; the rest is in app.py and
port.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from aiohttp import web

from pipeinfer.gateway.app import build_app
from pipeinfer.gateway.connections import Connections, most_connections
from pipeinfer.gateway.events import StatusChanged
from pipeinfer.gateway.handshakes import Acceptor
from pipeinfer.gateway.lately import RollingLatencies
from pipeinfer.gateway.responses import Handler
from pipeinfer.gateway.service import Service
from pipeinfer.gateway.tls import Certificate
from pipeinfer.messages import Message
from pipeinfer.runtime.closed_output import discard_unread
from pipeinfer.runtime.listening import BACKLOG, close_all
from pipeinfer.runtime.logs import CLEAR
from pipeinfer.runtime.terminal import rewrites

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT = 5.0  # seconds that handlers have to finish when the server stops
QUIET_SECONDS = 2.0  # seconds without a request after which idle connections may be closed
LEAVE_POLL = 0.01  # seconds
FIRST_HEARTBEATS = 1.0  # seconds within which the stages that are there have been heard


class HttpDriver:
    """Serves `service` on the sockets that `listen()` gives, which it closes. start() sets `url`.

    `url_of` says under which URL a user reaches a port; with a `certificate` they speak TLS.
    """

    def __init__(
        self,
        service: Service,
        url_of: Callable[[int], str],
        listen: Callable[[], list[socket.socket]],
        certificate: Certificate | None = None,
    ) -> None:
        self._service = service
        self._certificate = certificate
        self._url_of = url_of
        self._listen = listen
        self._sockets: list[socket.socket] = []
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._servers: list[asyncio.Server | Acceptor] = []
        self._ready = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None
        self._open = self._announced = self._leaving = False
        self._latencies = RollingLatencies(service.metrics)
        self._in_flight = 0  # requests whose handlers run
        self.url = ""

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Listens. ConfigurationError if the address cannot be had.

        Connections are accepted when the pipeline is ready, or when there was time to hear that it
        is not: the clients of a gateway that is started again need not be told "starting".
        """
        self._service.sessions.bind(feed)
        self._sockets = self._listen()
        runner = web.AppRunner(
            self._app(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT
        )
        await runner.setup()
        assert runner.server is not None
        self._runner = runner
        metrics = self._service.metrics
        self._connections = Connections(
            runner.server,
            most_connections(),
            metrics.bad_requests.inc,
            metrics.refused_connections.inc,
        )
        self.url = self._url_of(self._sockets[0].getsockname()[1])
        self._accepting = asyncio.create_task(self._accept(self._connections))

    def deliver(self, message: Message) -> None:
        """Takes the core's local outputs."""
        if isinstance(message, StatusChanged):
            if message.status != "starting":
                self._ready.set()
            self._announce()
        else:
            self._service.sessions.deliver(message)  # type: ignore[arg-type]

    async def leave(self, seconds: float) -> None:
        """Leaves new connections to whoever else holds the sockets, and ends the others.

        Each ends with its next answer, which says so, and at the latest after `seconds`.
        """
        if self._runner is None or self._runner.server is None:
            return
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        self._leaving = True
        self._end_monitor_feeds()
        await self._end_accepting()
        self._close_servers()
        quiet_since = clock()
        while clock() < min(quiet_since + QUIET_SECONDS, deadline):
            await asyncio.sleep(LEAVE_POLL)
            if self._in_flight:
                quiet_since = clock()
        self._service.sessions.fail_all(503, "the server is shutting down")
        self._runner.server.pre_shutdown()  # wakes those that wait for a request
        await self._runner.server.shutdown(SHUTDOWN_TIMEOUT)

    async def stop(self) -> None:
        """Ends running streams with an error, sends what is left, closes all connections."""
        self._end_monitor_feeds()
        self._service.sessions.fail_all(503, "the server is shutting down")
        await self._end_accepting()
        self._close_servers()
        if self._connections is not None:
            self._connections.stop()
        if self._runner is not None:
            await self._runner.cleanup()

    def stats(self) -> dict[str, float]:
        """What clients got lately."""
        return self._latencies.stats(time.monotonic())

    def _app(self) -> web.Application:
        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._in_flight += 1
            try:
                return await handler(request)
            finally:
                self._in_flight -= 1

        async def end_connection(_request: web.Request, response: web.StreamResponse) -> None:
            if self._leaving:
                response.force_close()
                # aiohttp has written its headers before; a client that is not told uses it again.
                response.headers["Connection"] = "close"

        app = build_app(self._service)
        app.middlewares.insert(0, counted)
        app.on_response_prepare.append(end_connection)
        return app

    async def _accept(self, connections: Connections) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), FIRST_HEARTBEATS)
        loop, certificate = asyncio.get_running_loop(), self._certificate
        for one in self._sockets:
            if certificate is None:
                server = await loop.create_server(connections, sock=one, backlog=BACKLOG)
            else:
                server = Acceptor(one, partial(connections.accept_tls, context=certificate.context))
            self._servers.append(server)
        self._open = True
        self._announce()

    def _end_monitor_feeds(self) -> None:
        """Those of the page never end by themselves, and an end would wait for them."""
        if self._service.monitor is not None:
            self._service.monitor.leaving = True

    def _close_servers(self) -> None:
        """Takes no connection any more; those that are there stay."""
        for server in self._servers:
            server.close()
        self._servers = []

    async def _end_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        if not self._open:
            close_all(self._sockets)

    def _announce(self) -> None:
        if self._open and not self._announced and self._service.core.status == "ready":
            self._announced = True
            page = f"chat in a browser at {self.url}, " if self._service.monitor is not None else ""
            log.info("%ssend requests to %s/v1, stop with Ctrl-C", page, self.url)
            over = CLEAR if rewrites(sys.stdout) else ""
            try:
                print(f"{over}ready {self.url}", file=sys.stdout, flush=True)
            except BrokenPipeError:  # a server goes on, whether anybody reads that or not
                discard_unread()

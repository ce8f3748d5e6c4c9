"""The gateway's HTTP server: address, TLS certificate, and when connections are accepted.

Joins the application to the core. Knows the line that says "ready"; the handlers are in app.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from pipeinfer.gateway.app import build_app
from pipeinfer.gateway.connections import Acceptor, Connections, connection_limit
from pipeinfer.gateway.errors import Handler
from pipeinfer.gateway.events import StatusChanged
from pipeinfer.gateway.metrics import RollingLatencies
from pipeinfer.gateway.serving import Service
from pipeinfer.messages import Message
from pipeinfer.runtime.logs import CLEAR_LINE, can_rewrite, discard_unread
from pipeinfer.runtime.servers import BACKLOG, close_all
from pipeinfer.settings import ConfigurationError, Settings


class Certificate:
    """The certificate chain and key of two files. context: makes connections; reload() changes
    it."""

    def __init__(self, chain: str, key: str) -> None:
        """Raises ConfigurationError if the files cannot be read, or do not belong together."""
        self._chain = chain
        self._key = key
        self.context = self._read()

    def reload(self) -> None:
        """Uses what the files hold now for new connections.

        Raises ConfigurationError as the constructor does; then nothing changes.
        """
        self._read()  # a half-loaded pair must not get into the context that is in use
        self.context.load_cert_chain(self._chain, self._key, password=_refuse_password)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        for flag, path in (("--tls-cert", self._chain), ("--tls-key", self._key)):
            try:
                with Path(path).open("rb"):
                    pass
            except OSError as error:
                raise ConfigurationError(f"{flag} {path}: {error.strerror or error}") from None
        try:
            context.load_cert_chain(self._chain, self._key, password=_refuse_password)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or "one of them is no PEM file of its kind"
            pair = f"--tls-cert {self._chain} --tls-key {self._key}"
            raise ConfigurationError(f"{pair}: {reason}") from None
        return context


def _refuse_password() -> str:
    """Stands in for OpenSSL's question on the terminal."""
    raise ValueError("a key with a password")


def load_certificate(settings: Settings) -> Certificate | None:
    """The certificate that the settings name; None for plain HTTP. Raises ConfigurationError."""
    if not settings.tls_cert and not settings.tls_key:
        return None
    if not settings.tls_cert or not settings.tls_key:
        raise ConfigurationError("--tls-cert and --tls-key need each other")
    return Certificate(settings.tls_cert, settings.tls_key)


def server_url(settings: Settings, port: int) -> str:
    """The URL by which users reach a server that listens on `port`: its public address if set."""
    scheme = "https" if settings.tls_cert else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    public = settings.public_address.rstrip("/")
    # As Docker takes what it publishes: a port alone, and these, are all addresses of the host.
    at, _, published = public.rpartition(":")
    if published.isdecimal() and at in ("", "0.0.0.0", "[::]"):
        public = f"127.0.0.1:{published}"
    return public if "://" in public else f"{scheme}://{public or f'{host}:{port}'}"


log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT = 5.0  # seconds that handlers have to finish when the server stops
QUIET_SECONDS = 2.0  # seconds without a request after which idle connections may be closed
LEAVE_POLL = 0.01  # seconds
FIRST_HEARTBEATS = 1.0  # seconds within which the stages that are there have been heard


class HttpDriver:
    """Serves `service` over HTTP or, with a `certificate`, HTTPS.

    listen(): gives the sockets, which the driver closes. url_of(port): the URL for users.
    url: set by start().
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
        """Listens. Raises ConfigurationError if the address is taken.

        Connections are accepted when the pipeline is ready, at the latest after FIRST_HEARTBEATS:
        clients of a restarted gateway need not be refused as "starting".
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
            connection_limit(),
            metrics.bad_requests.inc,
            metrics.refused_connections.inc,
        )
        self.url = self._url_of(self._sockets[0].getsockname()[1])
        self._accepting = asyncio.create_task(self._accept(self._connections))

    def deliver(self, message: Message) -> None:
        """Takes local events of the core."""
        if isinstance(message, StatusChanged):
            if message.status != "starting":
                self._ready.set()
            self._announce()
        else:
            self._service.sessions.deliver(message)  # type: ignore[arg-type]

    async def leave(self, seconds: float) -> None:
        """Leaves new connections to other processes with the same sockets, and ends its own.

        Each connection ends with its next answer, which says so, and at the latest after `seconds`.
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
        """Ends running streams with an error, sends what is buffered, closes all connections."""
        self._end_monitor_feeds()
        self._service.sessions.fail_all(503, "the server is shutting down")
        await self._end_accepting()
        self._close_servers()
        if self._connections is not None:
            self._connections.stop()
        if self._runner is not None:
            await self._runner.cleanup()

    def stats(self) -> dict[str, float]:
        """Statistics of the last minute; see RollingLatencies."""
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
        """Monitor feeds never end by themselves, and the shutdown would wait for them."""
        if self._service.monitor is not None:
            self._service.monitor.leaving = True

    def _close_servers(self) -> None:
        """Accepts no more connections; open ones stay."""
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
            over = CLEAR_LINE if can_rewrite(sys.stdout) else ""
            try:
                print(f"{over}ready {self.url}", file=sys.stdout, flush=True)
            except BrokenPipeError:  # a server goes on, whether anybody reads that or not
                discard_unread()

"""The gateway's I/O beside the bus: it listens for HTTP and joins the application to the core.

Knows sockets and the line that says "ready"; the rest is in app.py and port.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from aiohttp import web

from pipeinfer.gateway.app import Service, build_app
from pipeinfer.gateway.events import StatusChanged
from pipeinfer.messages import Message
from pipeinfer.settings import ConfigurationError

LISTEN_BACKLOG = 1024
LAST_BYTES = 5.0  # seconds that handlers have to finish when the server stops


class HttpDriver:
    """Serves `service` on host:port; port 0 takes a free one. `url` is set by start()."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service = service
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None
        self._announced = False
        self.url = ""

    async def start(self, feed: Callable[[Message], None]) -> None:
        """Listens. ConfigurationError if the address cannot be had."""
        self._service.port.bind(feed)
        runner = web.AppRunner(
            build_app(self._service),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=LAST_BYTES,
        )
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, self._host, self._port, backlog=LISTEN_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or error
            raise ConfigurationError(
                f"cannot listen on {self._host}:{self._port}: {reason}"
            ) from error
        port = runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{port}"
        self._announce()

    def deliver(self, message: Message) -> None:
        """Takes the core's local outputs."""
        if isinstance(message, StatusChanged):
            self._announce()
        else:
            self._service.port.deliver(message)  # type: ignore[arg-type]

    async def stop(self) -> None:
        """Ends running streams with an error, sends what is left, closes all connections."""
        self._service.port.fail_all(503, "the server is shutting down")
        if self._runner is not None:
            await self._runner.cleanup()

    def stats(self) -> dict[str, float]:
        """`port`: the one it listens on."""
        return {"port": float(self.url.rpartition(":")[2])} if self.url else {}

    def _announce(self) -> None:
        if self.url and not self._announced and self._service.core.status == "ready":
            self._announced = True
            print(f"ready {self.url}", file=sys.stdout, flush=True)

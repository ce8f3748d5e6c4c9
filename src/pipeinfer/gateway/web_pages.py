"""What web pages may ask a server without keys, which trusts whoever reaches it.

A browser that reaches the server lends that to each page it shows: the page posts what needs no
preflight, or gives its own name the server's address (DNS rebinding) and then reads all answers.
With keys none of this matters, because no page knows one. Knows no keys and no endpoint.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Middleware

from pipeinfer.gateway.cors import Cors
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.responses import Handler
from pipeinfer.settings import ConfigurationError

PLAIN = re.compile(r"[a-z0-9_-]*")  # without a dot: no page of the web has such a name
NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
JSON = re.compile(r"application/([a-z0-9!#$&^_.+-]+\+)?json")
# Asked by load balancers and Prometheus by any name. Nothing that they tell is of a client.
OF_ANY_HOST = ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version")
SHOWN = 253  # letters of a name, of which DNS has no more


@dataclass(frozen=True)
class WebPages:
    """`hosts`: names with a dot that are the server's, {"*"} is all. `trusting()`: whether no key
    is needed; then, and where there are `hosts`, others are refused. `guarded(path)`: whether the
    path is one that a key would guard."""

    hosts: frozenset[str]
    named: bool
    cors: Cors
    trusting: Callable[[], bool]
    guarded: Callable[[str], bool]

    def middleware(self) -> Middleware:
        """To stand behind CORS, whose preflights are answered there, and before keys and bodies."""

        @web.middleware
        async def pages(request: web.Request, handler: Handler) -> web.StreamResponse:
            trusting = self.trusting()
            if (trusting or self.named) and request.path not in OF_ANY_HOST:
                self._check_host(request)
            if trusting and request.method != "OPTIONS" and self.guarded(request.path):
                self._check_origin(request)
                if request.method == "POST":
                    _check_json(request)
            return await handler(request)

        return pages

    def _check_host(self, request: web.Request) -> None:
        """A request without Host is no browser's: those speak HTTP/1.1 and say it."""
        host = request.host if "Host" in request.headers else ""
        name = host_name(host)
        if not own(name) and name not in self.hosts and "*" not in self.hosts:
            message = (
                f"this server is asked by the name {name[:SHOWN]!r}, which it does not know: set "
                f"--allowed-hosts {name[:SHOWN]}, or ask by an IP address"
            )
            raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, request: web.Request) -> None:
        """By Sec-Fetch-Site, which pages cannot write. Browsers send it over https and to
        localhost; elsewhere Origin tells the same of all that is not a plain GET."""
        origin = request.headers.get("Origin", "")
        site = request.headers.get("Sec-Fetch-Site", "")
        if site:
            foreign = site not in ("same-origin", "none")
        else:
            host = request.headers.get("Host", "")
            foreign = bool(origin) and origin.partition("://")[2].lower() != host.lower()
        if foreign and not self.cors.allowed(request):
            page = repr(origin[:SHOWN]) if origin else "another site"
            message = f"a web page of {page} may not ask: --allowed-origins names those that may"
            raise ApiError(403, message, code="origin_not_allowed")


def _check_json(request: web.Request) -> None:
    """What else there is a page may send without a preflight. Without a type a browser alone may
    not, which is known by what it says of the page."""
    given = request.headers.get("Content-Type")
    if given is None:
        bad = "Origin" in request.headers or "Sec-Fetch-Site" in request.headers
    else:
        bad = JSON.fullmatch(given.partition(";")[0].strip().lower()) is None
    if bad:
        had = f"not {given[:SHOWN]!r}" if given else "which is missing"
        message = f"the body must be JSON: send the header `Content-Type: application/json`, {had}"
        raise ApiError(415, message, code="unsupported_media_type")


def host_name(host: str) -> str:
    """The name in a Host header: without port and brackets, in lower case."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0] if host.count(":") == 1 else host
    return name.lower().removesuffix(".")


def own(name: str) -> bool:
    """Whether no page of the web can have the name: an IP address, one without a dot, or below
    localhost."""
    if PLAIN.fullmatch(name) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def read_hosts(text: str) -> frozenset[str]:
    """From the setting: names with commas between them, or *. Raises ConfigurationError."""
    names = [word.strip().lower().removesuffix(".") for word in text.split(",") if word.strip()]
    for name in names:
        if name != "*" and NAME.fullmatch(name) is None and not own(name):
            message = "must be a name like gateway.example.org, without scheme, port and path"
            raise ConfigurationError(f"--allowed-hosts: {name!r} {message}")
    return frozenset(names)

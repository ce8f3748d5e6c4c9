"""What web pages may ask of this server: CORS, and the guard of servers without keys.

A browser that reaches a server without keys lends that access to each page it shows: a page posts
what needs no preflight, or points its own name to the server's address (DNS rebinding) and reads
all answers. With keys none of this matters, because no page knows a key. Knows no endpoint.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Middleware

from pipeinfer.gateway.errors import ApiError, Handler
from pipeinfer.settings import ConfigurationError

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@\[\]:]+)(:[0-9]{1,5})?")
HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")  # of headers; more than any client sends
METHODS = "GET, POST"
EXPOSED_HEADERS = (
    "x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-schema-left-out"
)
MAX_AGE = "600"  # seconds for which a browser need not ask again


@dataclass(frozen=True)
class Cors:
    """Cross-origin resource sharing, without credentials: a page sends its key itself.

    origins: those that may read answers; {"*"}: all, empty: none.
    """

    origins: frozenset[str] = frozenset()

    def middleware(self) -> Middleware:
        """Answers preflight requests of browsers."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_preflight = "Access-Control-Request-Method" in request.headers
            if request.method != "OPTIONS" or not is_preflight or not self.allow_origin(request):
                return await handler(request)
            headers = {
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Max-Age": MAX_AGE,
            }
            requested_headers = request.headers.get("Access-Control-Request-Headers", "")
            if HEADER_NAMES.fullmatch(requested_headers):
                headers["Access-Control-Allow-Headers"] = requested_headers
            return web.Response(status=204, headers=headers)

        return preflight

    async def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers by which an allowed page may read the response, also if it is an
        error."""
        if not self.origins:
            return
        if "*" not in self.origins:
            response.headers.add("Vary", "Origin")  # caches must not mix up pages
        allowed = self.allow_origin(request)
        if allowed:
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    def allow_origin(self, request: web.Request) -> str:
        """The value of Access-Control-Allow-Origin; "" for none."""
        origin = request.headers.get("Origin", "")
        if not origin:
            return ""
        if "*" in self.origins:
            return "*"
        return origin if origin in self.origins else ""


def parse_origins(text: str) -> Cors:
    """Reads --allowed-origins: origins with commas between them, or *. Raises
    ConfigurationError."""
    origins = [word.strip().lower() for word in text.split(",") if word.strip()]
    for origin in origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            message = "must be like https://example.org or http://localhost:3000, without a path"
            raise ConfigurationError(f"--allowed-origins: {origin!r} {message}")
    return Cors(frozenset(origins))


PRIVATE_NAME = re.compile(r"[a-z0-9_-]*")  # without a dot: no page of the web has such a name
HOST_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
JSON_TYPE = re.compile(r"application/([a-z0-9!#$&^_.+-]+\+)?json")
# Asked by load balancers and Prometheus by any name. Nothing that they tell is of a client.
ANY_HOST_PATHS = ("/health", "/health/live", "/health/ready", "/ping", "/metrics", "/version")
MAX_NAME_LETTERS = 253  # letters of a name, of which DNS has no more


@dataclass(frozen=True)
class BrowserGuard:
    """Refuses requests that web pages of other sites make.

    hosts: names with a dot by which the server may be asked; {"*"}: all.
    hosts_named: whether a setting named hosts; then others are refused also where keys are needed.
    cors: the origins that are allowed.
    keyless(): whether no key is needed now.
    is_protected(path): whether the path would need a key.
    """

    hosts: frozenset[str]
    hosts_named: bool
    cors: Cors
    keyless: Callable[[], bool]
    is_protected: Callable[[str], bool]

    def middleware(self) -> Middleware:
        """To stand behind CORS, whose preflights are answered there, and before keys and bodies."""

        @web.middleware
        async def pages(request: web.Request, handler: Handler) -> web.StreamResponse:
            trusting = self.keyless()
            if (trusting or self.hosts_named) and request.path not in ANY_HOST_PATHS:
                self._check_host(request)
            if trusting and request.method != "OPTIONS" and self.is_protected(request.path):
                self._check_origin(request)
                if request.method == "POST":
                    _check_json(request)
            return await handler(request)

        return pages

    def _check_host(self, request: web.Request) -> None:
        """A request without Host is no browser's: those speak HTTP/1.1 and say it."""
        host = request.host if "Host" in request.headers else ""
        name = host_name(host)
        if not is_private_name(name) and name not in self.hosts and "*" not in self.hosts:
            shown = name[:MAX_NAME_LETTERS]
            message = (
                f"this server is asked by the name {shown!r}, which it does not know: set "
                f"--allowed-hosts {shown}, or ask by an IP address"
            )
            raise ApiError(403, message, code="host_not_allowed")

    def _check_origin(self, request: web.Request) -> None:
        """By Sec-Fetch-Site, which pages cannot write. Browsers send it over https and to
        localhost; elsewhere Origin tells the same of all that is not a plain GET."""
        origin = request.headers.get("Origin", "")
        site = request.headers.get("Sec-Fetch-Site", "")
        if site:
            cross_origin = site not in ("same-origin", "none")
        else:
            host = request.headers.get("Host", "")
            cross_origin = bool(origin) and origin.partition("://")[2].lower() != host.lower()
        if cross_origin and not self.cors.allow_origin(request):
            page = repr(origin[:MAX_NAME_LETTERS]) if origin else "another site"
            message = f"a web page of {page} may not ask: --allowed-origins names those that may"
            raise ApiError(403, message, code="origin_not_allowed")


def _check_json(request: web.Request) -> None:
    """What else there is a page may send without a preflight. Without a type a browser alone may
    not, which is known by what it says of the page."""
    given = request.headers.get("Content-Type")
    if given is None:
        bad = "Origin" in request.headers or "Sec-Fetch-Site" in request.headers
    else:
        bad = JSON_TYPE.fullmatch(given.partition(";")[0].strip().lower()) is None
    if bad:
        had = f"not {given[:MAX_NAME_LETTERS]!r}" if given else "which is missing"
        message = f"the body must be JSON: send the header `Content-Type: application/json`, {had}"
        raise ApiError(415, message, code="unsupported_media_type")


def host_name(host: str) -> str:
    """The name in a Host header: without port and brackets, in lower case."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    else:
        name = host.partition(":")[0] if host.count(":") == 1 else host
    return name.lower().removesuffix(".")


def is_private_name(name: str) -> bool:
    """Whether no page of the web can have this name: an IP address, a name without a dot,
    *.localhost."""
    if PRIVATE_NAME.fullmatch(name) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def parse_hosts(text: str) -> frozenset[str]:
    """Reads --allowed-hosts: names with commas between them, or *. Raises ConfigurationError."""
    names = [word.strip().lower().removesuffix(".") for word in text.split(",") if word.strip()]
    for name in names:
        if name != "*" and HOST_NAME.fullmatch(name) is None and not is_private_name(name):
            message = "must be a name like gateway.example.org, without scheme, port and path"
            raise ConfigurationError(f"--allowed-hosts: {name!r} {message}")
    return frozenset(names)

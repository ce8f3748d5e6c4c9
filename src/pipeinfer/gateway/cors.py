"""Which web pages may ask this server from a browser: cross-origin resource sharing (CORS).

Off unless origins are named. Never with credentials: a key is sent by the page itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Middleware

from pipeinfer.gateway.responses import Handler
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
    """The origins that are allowed; {"*"} is all, none at all is no CORS."""

    origins: frozenset[str] = frozenset()

    def middleware(self) -> Middleware:
        """Answers the questions that browsers ask before the request itself (preflight)."""

        @web.middleware
        async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            asked = "Access-Control-Request-Method" in request.headers
            if request.method != "OPTIONS" or not asked or not self.allow_origin(request):
                return await handler(request)
            headers = {
                "Access-Control-Allow-Methods": METHODS,
                "Access-Control-Max-Age": MAX_AGE,
            }
            wanted = request.headers.get("Access-Control-Request-Headers", "")
            if HEADER_NAMES.fullmatch(wanted):
                headers["Access-Control-Allow-Headers"] = wanted
            return web.Response(status=204, headers=headers)

        return preflight

    async def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds the headers that let an allowed page read the response, errors included."""
        if not self.origins:
            return
        if "*" not in self.origins:
            response.headers.add("Vary", "Origin")  # caches must not mix up pages
        allowed = self.allow_origin(request)
        if allowed:
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    def allow_origin(self, request: web.Request) -> str:
        """What to answer under Allow-Origin; "" for nothing."""
        origin = request.headers.get("Origin", "")
        if not origin:
            return ""
        if "*" in self.origins:
            return "*"
        return origin if origin in self.origins else ""


def parse_origins(text: str) -> Cors:
    """From the setting: origins with commas between them, or *. Raises ConfigurationError."""
    origins = [word.strip().lower() for word in text.split(",") if word.strip()]
    for origin in origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            message = "must be like https://example.org or http://localhost:3000, without a path"
            raise ConfigurationError(f"--allowed-origins: {origin!r} {message}")
    return Cors(frozenset(origins))

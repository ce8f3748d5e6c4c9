"""Responses in OpenAI's form, for handlers, middlewares and connections.

Knows errors and JSON, and no endpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from pipeinfer.gateway.errors import ApiError
from pipeinfer.json_values import JsonObject

GONE = 499  # the status of what nobody will read: its client has left
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(content: JsonObject, status: int = 200) -> web.Response:
    """`content` as JSON."""
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )


def error_response(error: ApiError) -> web.Response:
    """The response that an error is, with Retry-After where trying again makes sense."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
    return web.Response(
        body=error.body(), status=error.status, content_type="application/json", headers=headers
    )


def of_http(request: web.BaseRequest, error: web.HTTPException) -> ApiError:
    """What aiohttp itself refuses, in words that name the request."""
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"there is no {request.path}", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return ApiError(405, f"{request.path} does not take {request.method}")
    return ApiError(error.status, error.reason)


class Unroutable(web.Response):
    """An answer to what is no request: aiohttp's hooks for responses do not see it."""

    @classmethod
    def of(cls, error: ApiError) -> Unroutable:
        """The error, on a connection that ends with it."""
        made = cls(body=error.body(), status=error.status, content_type="application/json")
        made.force_close()
        return made

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        del self.headers["Server"]

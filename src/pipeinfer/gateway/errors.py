"""Errors of HTTP requests: status, `{"error": {...}}` as OpenAI's clients expect it, and all codes.

Knows neither the fields of requests nor endpoints.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec
from aiohttp import web

from pipeinfer.params import JsonObject

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
MAX_LETTERS = 2000  # of a message: it may quote what the client sent
WHERE = re.compile(
    r"^(?P<what>.*) - at (?P<key>`key` in )?`(?P<path>.*?)(\[\.\.\.\])?`$", re.DOTALL
)


T = TypeVar("T")

_NESTED = re.compile(
    r"\.(function|custom)(?=\.|$)"
)  # objects around a tool's fields in chats alone


class ApiError(Exception):
    """Ends one HTTP request. `param` names the offending field; `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int = 0,
    ) -> None:
        message = _shortened(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The JSON of the error."""
        error = {
            "message": self.message,
            "type": TYPES.get(
                self.status, "server_error" if self.status >= 500 else "invalid_request_error"
            ),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def from_validation(error: msgspec.ValidationError) -> ApiError:
    """400 for what msgspec found, with its `$.stop[0]` as the parameter `stop[0]`.

    Of an object whose keys the client chooses (`$.logit_bias[...]`) the parameter is the whole.
    """
    text = _shortened(str(error))
    found = WHERE.match(text)
    if found is None:  # the body as a whole, or a missing field, whose name msgspec quotes
        missing = re.search(r"missing required field `(\w+)`", text)
        return ApiError(400, text, missing[1] if missing else None, "invalid_type")
    path = found["path"].removeprefix("$").removeprefix(".") or None
    missing = re.search(r"missing required field `(\w+)`", found["what"])
    if missing:
        path = f"{path}.{missing[1]}" if path else missing[1]
    where = f"a key of {path}" if found["key"] else path
    message = f"{where}: {found['what']}" if where else found["what"]
    unsupported = re.match(r"(\w+) is not supported", found["what"])
    if unsupported:
        path = f"{path}.{unsupported[1]}" if path else unsupported[1]
        return ApiError(400, message, path, "unsupported_parameter")
    return ApiError(400, message, path, "invalid_type")


def required(value: T | None, where: str) -> T:
    """`value`, which a body must have at `where`. ApiError 400."""
    if value is None:
        raise ApiError(400, f"{where} must be given", where, "invalid_value")
    return value


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """`error` with the other name of the field that is wrong, from `names`: {name: other name}."""
    param = error.param or ""
    name = field_in(names, param)
    if name == param and param not in names:
        return error
    pattern = rf"(?<![\w.]){re.escape(param)}(?!\w)"
    message = re.sub(pattern, lambda _: name, error.message, count=1)
    return ApiError(error.status, message, name, error.code, error.retry_after)


def field_in(names: Mapping[str, str], param: str) -> str:
    """The other name of a field, or of one within a field of `names`; `param` if there is none."""
    longest = max((name for name in names if _is_within(param, name)), key=len, default="")
    return names[longest] + _NESTED.sub("", param[len(longest) :]) if longest else param


def _is_within(param: str, name: str) -> bool:
    return param == name or param.startswith((f"{name}.", f"{name}["))


def _shortened(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= MAX_LETTERS:
        return text
    half = MAX_LETTERS // 2 - 2
    return f"{text[:half]} … {text[-half:]}"


# {code: (statuses, when)}. Other errors have no code.
CODES: dict[str, tuple[tuple[int, ...], str]] = {
    "invalid_json": ((400,), "The body is empty or no JSON."),
    "invalid_type": ((400,), "A field has the wrong type, or a required field is missing."),
    "invalid_value": (
        (400,),
        "A field's value is outside its range, or the body is nested too deeply or holds too many "
        "values.",
    ),
    "unsupported_parameter": (
        (400,),
        "The field changes an answer in other servers and is not built here.",
    ),
    "context_length_exceeded": (
        (400,),
        "The prompt, or prompt and `max_tokens`, exceed the model's context.",
    ),
    "bad_request": ((400,), "What came is no HTTP."),
    "invalid_body": ((400,), "The body is cut off or cannot be decompressed."),
    "invalid_api_key": ((401,), "The API key is wrong or missing."),
    "host_not_allowed": (
        (403,),
        "The server is asked by a name that is not its own: see `--allowed-hosts`.",
    ),
    "origin_not_allowed": (
        (403,),
        "A web page of another site asks a server without keys: see `--allowed-origins`.",
    ),
    "model_not_found": ((404,), "Another model is served."),
    "not_found": ((404,), "There is no such path."),
    "not_seen": (
        (404,),
        "No spans are known of the request that `/monitor/requests` was asked for.",
    ),
    "timeout": ((408,), "The request's `timeout` passed before the first output."),
    "body_timeout": ((408,), "The body does not come."),
    "body_too_large": ((413,), "The body has more than `--max-body-mib`."),
    "unsupported_encoding": ((415,), "The body is compressed otherwise than by gzip or deflate."),
    "unsupported_media_type": (
        (415,),
        "The body's Content-Type is not `application/json`, at a server without keys.",
    ),
    "unknown_expectation": (
        (417,),
        "`Expect` is not `100-continue`. With `100-continue` a client gets `100 Continue` only if "
        "its key, its limits and the body's length allow the request.",
    ),
    "queue_full": (
        (429,),
        "`--max-queue` requests or `--max-queue-tokens` prompt tokens wait already.",
    ),
    "rate_limit_exceeded": ((429,), "A limit of the key is reached. `Retry-After` says how long."),
    "request_failed": (
        (500,),
        "This request failed: its logits were not finite, or the engine crashed on it repeatedly.",
    ),
    "stream_broken": ((500,), "A part of this request's text was lost."),
    "not_implemented": ((501,), "The model cannot do this."),
    "too_many_pages": ((503,), "64 feeds of `/monitor/events` are open at this gateway."),
    "reset_unanswered": ((503,), "A group has not said that its cache is reset."),
    "host_lost": ((503,), "A stage that it needs was silent for ten times `--host-loss`."),
    "starting": ((503,), "The server is not ready yet."),
    "draining": ((503,), "The server shuts down and takes no new requests."),
    "overloaded": ((503,), "Too many large bodies are being read."),
    "too_many_connections": ((503,), "All connections are busy."),
    "shutting_down": ((503,), "The drain timeout passed before the request was done."),
}


CLIENT_CLOSED_REQUEST = 499  # the status of a request whose client has left
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(content: JsonObject, status: int = 200) -> web.Response:
    """A response with `content` as JSON."""
    return web.Response(
        body=msgspec.json.encode(content), status=status, content_type="application/json"
    )


def error_response(error: ApiError) -> web.Response:
    """The error as a response, with Retry-After where trying again makes sense."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else None
    return web.Response(
        body=error.body(), status=error.status, content_type="application/json", headers=headers
    )


def http_error(request: web.BaseRequest, error: web.HTTPException) -> ApiError:
    """An error of aiohttp's own, such as 404, with a message that names the path."""
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, f"there is no {request.path}", code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return ApiError(405, f"{request.path} does not take {request.method}")
    return ApiError(error.status, error.reason)


class UnroutableResponse(web.Response):
    """The response to bytes that are not HTTP: aiohttp's hooks for responses do not see it."""

    @classmethod
    def of(cls, error: ApiError) -> UnroutableResponse:
        """The error, on a connection that ends with it."""
        made = cls(body=error.body(), status=error.status, content_type="application/json")
        made.force_close()
        return made

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        del self.headers["Server"]

"""Errors as OpenAI's clients expect them: a status and `{"error": {...}}`.

Knows neither requests nor the HTTP library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

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
MOST_LETTERS = 2000  # of a message: it may quote what the client sent
WHERE = re.compile(
    r"^(?P<what>.*) - at (?P<key>`key` in )?`(?P<path>.*?)(\[\.\.\.\])?`$", re.DOTALL
)


T = TypeVar("T")

_NESTED = re.compile(r"\.(function|custom)(?=\.|$)")  # what chats alone put a tool's fields within


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
    """`error` with another name of the field that is wrong; `names` are by those that it has."""
    param = error.param or ""
    name = field_in(names, param)
    if name == param and param not in names:
        return error
    pattern = rf"(?<![\w.]){re.escape(param)}(?!\w)"
    message = re.sub(pattern, lambda _: name, error.message, count=1)
    return ApiError(error.status, message, name, error.code, error.retry_after)


def field_in(names: Mapping[str, str], param: str) -> str:
    """What a field, or one within it, is called otherwise; the same where `names` say nothing."""
    known = max((name for name in names if _begins(param, name)), key=len, default="")
    return names[known] + _NESTED.sub("", param[len(known) :]) if known else param


def _begins(param: str, name: str) -> bool:
    return param == name or param.startswith((f"{name}.", f"{name}["))


def _shortened(text: str) -> str:
    """Without its middle, if it is long: what matters stands at its ends."""
    if len(text) <= MOST_LETTERS:
        return text
    half = MOST_LETTERS // 2 - 2
    return f"{text[:half]} … {text[-half:]}"

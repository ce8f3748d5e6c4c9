"""Where all dialects hand over the form that an answer must have: `response_format` of chats.

Knows chat's form of it only.
"""

from __future__ import annotations

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import ChatRequest
from pipeinfer.json_values import JsonObject


def with_format(request: ChatRequest, form: JsonObject, param: str) -> ChatRequest:
    """`request` with an answer of that form, `{"type": ..., "json_schema": {...}}`; `param` is what
    the dialect calls it. ApiError 400 for one that is not served."""
    if form.get("type") == "text":
        return request
    message = f"{param} is not supported by this server unless it asks for text"
    raise ApiError(400, message, param, "unsupported_parameter")

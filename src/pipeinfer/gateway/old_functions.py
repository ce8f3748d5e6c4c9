"""OpenAI's older way of calling: `functions` and `function_call` of chats, as tools say it.

Templates of open models know tools alone, so messages are translated, too. Knows the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.schema import ChatMessage, ChatRequest, Tool, ToolChoice
from pipeinfer.json_values import JsonObject

# What chats with tools call a field, and what it is called here.
LEGACY_FIELD_NAMES = {"tools": "functions", "tool_choice": "function_call"}


def functions_to_tools(request: ChatRequest) -> ChatRequest | None:
    """The same with tools, of which one call is told; None where there are no functions.

    ApiError 400.
    """
    choice = request.function_call
    if not request.functions:
        if choice not in (None, "none", "auto"):
            message = "function_call is only allowed with functions"
            raise ApiError(400, message, "function_call", "invalid_value")
        return None
    for name in ("tools", "tool_choice"):
        if getattr(request, name) is not None:
            message = f"{name} is not allowed with functions: they say the same"
            raise ApiError(400, message, name, "invalid_value")
    return replace(
        request,
        functions=None,
        function_call=None,
        tools=[Tool("function", function) for function in request.functions],
        tool_choice=_tool_choice(request),
        parallel_tool_calls=False,
    )


def _tool_choice(request: ChatRequest) -> Literal["none", "auto"] | ToolChoice | None:
    choice = request.function_call
    if isinstance(choice, str) or choice is None:
        return choice
    return ToolChoice("function", choice)


def function_messages_to_tool_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Calls of functions and what they gave, as calls of tools. ApiError 400."""
    if any(message.function_call is not None or message.role == "function" for message in messages):
        return list(_as_tool_messages(messages))
    return messages


def _as_tool_messages(messages: list[ChatMessage]) -> Iterator[ChatMessage]:
    """A result belongs to the last call of its function."""
    ids: dict[str, str] = {}
    for i, message in enumerate(messages):
        called = message.function_call
        # Nine letters and digits, as templates of Mistral's demand.
        call_id = f"call{i:05d}"
        if message.role == "function":
            call_id, text = ids.get(message.name or "", call_id), message.content or ""
            yield replace(message, role="tool", content=text, tool_call_id=call_id)
        elif called is None:
            yield message
        elif message.tool_calls:
            where = f"messages[{i}].function_call"
            text = f"{where} is not allowed beside tool_calls: a message calls in one way"
            raise ApiError(400, text, where, "invalid_value")
        else:
            ids[str(called.get("name"))] = call_id
            call: JsonObject = {"id": call_id, "type": "function", "function": called}
            yield replace(message, function_call=None, tool_calls=[call])

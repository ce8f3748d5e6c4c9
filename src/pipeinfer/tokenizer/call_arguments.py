"""Arguments of calls that a conversation holds: as objects, and as the text of one.

Clients send a text, which most templates want as an object; some join it to other texts. Knows no
template.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec

from pipeinfer.json_values import JsonObject, JsonValue

# Levels of nesting in arguments; no tool's schema is as deep, and what goes over them recurses.
MAX_ARGUMENT_DEPTH = 64


def argument_forms(chat: list[JsonObject]) -> list[list[JsonObject]]:
    """The conversation with objects as arguments, and then with texts, if the two differ. What is
    the text of no object stays a text in both, and no arguments at all are an empty object."""
    if not any(message.get("tool_calls") for message in chat):
        return [chat]
    objects = [_with_arguments(message, _as_object) for message in chat]
    texts = [_with_arguments(message, _as_text) for message in chat]
    return [objects] if objects == texts else [objects, texts]


def _with_arguments(message: JsonObject, write: Callable[[JsonValue], JsonValue]) -> JsonObject:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, write) for call in calls]}


def _call_with_arguments(call: JsonValue, write: Callable[[JsonValue], JsonValue]) -> JsonValue:
    """`call`, which OpenAI nests in its `function`, with other arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with_arguments(call["function"], write)}
    return {**call, "arguments": write(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: JsonValue) -> JsonValue:
    if not isinstance(arguments, str):
        return arguments
    raw = arguments.strip().encode("utf-8", "surrogatepass") or b"{}"
    try:
        found = msgspec.json.decode(raw, type=JsonObject)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments
    return found if _is_shallow(found) else arguments


def _as_text(arguments: JsonValue) -> JsonValue:
    if not isinstance(arguments, dict):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _is_shallow(value: JsonValue) -> bool:
    level: list[JsonValue] = [value]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return True
    return False


def _children(value: JsonValue) -> list[JsonValue]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []

"""The strings of a chat that its client wrote: messages and the template's arguments, nested.

Finds them, weighs them, and makes a copy with others in their place. Knows no token and no
template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from pipeinfer.json_values import JsonObject, JsonValue

# What a template knows by name and may build a control token of, as in '<|' + role + '|>'.
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
NODE_WEIGHT = 8  # bytes of text that take as long to encode as one more value takes to render
MAX_VALUES_WEIGHED = (
    10_000  # values that are looked at; counting more takes longer than short requests may wait
)
UNKNOWN_WEIGHT = 1 << 40  # the weight of what was not looked at to its end

# free: the whole text of a message's field, or of a part of its content. part: a string somewhere
# inside, which a template may look up or compare ("type": "function"). key: the name of a value.
StringKind = Literal["free", "part", "key"]
MapString = Callable[[str, StringKind], str]


def text_weight(*values: JsonValue | list[JsonObject]) -> int:
    """About how many bytes of text there are, in at most a millisecond; HUGE if that is too much
    to count."""
    waiting: list[JsonValue | list[JsonObject]] = list(values)
    total = seen = 0
    while waiting:
        value = waiting.pop()
        seen += 1
        if isinstance(value, str):
            total += _size(value)
        elif isinstance(value, dict | list):
            if seen + len(waiting) + 2 * len(value) > MAX_VALUES_WEIGHED:
                return UNKNOWN_WEIGHT
            waiting += value
            waiting += value.values() if isinstance(value, dict) else ()
    return total + NODE_WEIGHT * seen


def _size(text: str) -> int:
    """Bytes; of a very long text its characters, so that it need not be copied."""
    short = not text.isascii() and len(text) <= MAX_VALUES_WEIGHED
    return len(text.encode("utf-8", "surrogatepass")) if short else len(text)


def client_strings(
    chat: list[JsonObject], arguments: JsonObject
) -> Iterator[tuple[str, StringKind]]:
    """All of them, but for the roles that templates know."""
    found: list[tuple[str, StringKind]] = []

    def note(text: str, kind: StringKind) -> str:
        found.append((text, kind))
        return text

    map_client_strings(chat, arguments, note)
    return iter(found)


def map_client_strings(
    chat: list[JsonObject], arguments: JsonObject, write: MapString
) -> tuple[list[JsonObject], JsonObject]:
    """(messages, arguments) with `write(text, kind)` in place of each string."""
    messages = [_message(message, write) for message in chat]
    return messages, _object(arguments, write)


def _message(message: JsonObject, write: MapString) -> JsonObject:
    copy: JsonObject = {}
    for key, value in message.items():
        if key == "role" and isinstance(value, str) and value in ROLES:
            copy[key] = value
        elif isinstance(value, str):
            kind = "part" if key == "tool_call_id" else "free"  # as the id that it refers to
            copy[write(key, "key")] = write(value, kind)
        elif key == "content" and isinstance(value, list):
            copy[key] = [_part(part, write) for part in value]
        else:
            copy[write(key, "key")] = _nested(value, write)
    return copy


def _part(part: JsonValue, write: MapString) -> JsonValue:
    """Of a content, whose text a template shows as it shows a whole content."""
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return _nested(part, write)
    return {
        write(key, "key"): write(value, "free")
        if key == "text" and isinstance(value, str)
        else _nested(value, write)
        for key, value in part.items()
    }


def _nested(value: JsonValue, write: MapString) -> JsonValue:
    if isinstance(value, str):
        return write(value, "part")
    if isinstance(value, list):
        return [_nested(one, write) for one in value]
    if isinstance(value, dict):
        return _object(value, write)
    return value


def _object(value: JsonObject, write: MapString) -> JsonObject:
    return {write(key, "key"): _nested(one, write) for key, one in value.items()}

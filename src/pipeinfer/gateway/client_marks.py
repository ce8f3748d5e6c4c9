"""What a client writes into the system's message for its maker's accounts, and not for the model.

Claude Code begins it with a line that is another one in each request. In front of all prompts it
would keep every one of them from being found in the prefix cache.
"""

from __future__ import annotations

from pipeinfer.json_values import JsonObject, JsonValue

BILLING_HEADER = "x-anthropic-billing-header:"


def without_billing_header(chat: list[JsonObject]) -> list[JsonObject]:
    """The conversation without that line at the beginning of system messages and of their parts.
    What is left empty is left out, unless it is all there is."""
    remaining = [message for message in map(_without_line, chat) if message is not None]
    return remaining or chat


def _without_line(message: JsonObject) -> JsonObject | None:
    content = message.get("content")
    if message.get("role") != "system":
        return message
    if isinstance(content, str) and content.startswith(BILLING_HEADER):
        rest = _behind_line(content)
        return {**message, "content": rest} if rest else None
    if isinstance(content, list) and any(
        _part_text(part).startswith(BILLING_HEADER) for part in content
    ):
        texts = [_behind_line(text) for text in map(_part_text, content)]
        parts: list[JsonValue] = [{"type": "text", "text": text} for text in texts if text]
        return {**message, "content": parts} if parts else None
    return message


def _part_text(part: JsonValue) -> str:
    return str(part["text"]) if isinstance(part, dict) else ""


def _behind_line(text: str) -> str:
    """Behind the line, if there is one."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_HEADER) else text

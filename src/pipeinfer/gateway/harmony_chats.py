"""Conversations as chat templates of the harmony format can show them, and how hard they let a
model think.

Such a template shows one system message, one call a message, and either thoughts or content beside
it; what it has no place for it leaves out in silence or refuses. Knows no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeinfer.gateway.errors import ApiError
from pipeinfer.json_values import JsonObject, JsonValue

EFFORTS = ("low", "medium", "high")


def harmony_messages(chat: Sequence[JsonObject]) -> list[JsonObject]:
    """The same conversation, in messages that the template shows whole. All that the system says
    comes first."""
    return list(_template_messages(chat))


def check_reasoning_effort(arguments: JsonObject) -> None:
    """ApiError 400 for a reasoning_effort that the model was not trained on; the template would
    write it down all the same."""
    effort = arguments.get("reasoning_effort")
    if "reasoning_effort" in arguments and effort not in EFFORTS:
        known = ", ".join(EFFORTS)
        message = (
            f"reasoning_effort must be one of {known} for this model, not {str(effort)[:64]!r}"
        )
        raise ApiError(400, message, "reasoning_effort", "invalid_value")


def with_descriptions(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Tools as the template writes them: each with a description, if an empty one."""
    return [_with_description(tool) for tool in tools]


def _with_description(tool: JsonObject) -> JsonObject:
    function = tool.get("function")
    if not isinstance(function, dict) or function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}


def _template_messages(chat: Sequence[JsonObject]) -> Iterator[JsonObject]:
    system = [message for message in chat if message.get("role") == "system"]
    if system:
        texts = [_text(message.get("content")) for message in system]
        yield {**system[0], "content": "\n\n".join(text for text in texts if text)}
    chat, at = [message for message in chat if message.get("role") != "system"], 0
    while at < len(chat):
        message, at = chat[at], at + 1
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
            # The template takes an empty list for calls.
            yield {key: value for key, value in message.items() if value or key != "tool_calls"}
            continue
        behind = at
        while at < len(chat) and chat[at].get("role") == "tool":
            at += 1
        yield from _one_call_each(message, calls, chat[behind:at])


def _one_call_each(
    message: JsonObject, calls: list[JsonValue], results: Sequence[JsonObject]
) -> Iterator[JsonObject]:
    """Each call with what it gave. The template names a result after the call before it."""
    left = list(results)
    message = _content_as_reasoning(message)
    for i, call in enumerate(calls):
        yield {**message, "tool_calls": [call]}
        message = {"role": "assistant", "content": ""}  # what was thought is shown once
        name = call.get("id") if isinstance(call, dict) else None
        mine = left if i + 1 == len(calls) else [r for r in left if r.get("tool_call_id") == name]
        left = [result for result in left if result not in mine]
        yield from mine


def _content_as_reasoning(message: JsonObject) -> JsonObject:
    """With what was said beside the call as the end of the thoughts: the template shows one of
    both, as analysis."""
    content = _text(message.get("content"))
    thoughts = _text(message.get("reasoning_content"))
    if not thoughts or not content:
        return {**message, "content": content}
    return {**message, "reasoning_content": f"{thoughts}\n{content}", "content": ""}


def _text(content: JsonValue) -> str:
    """Parts as one text, as chats join them; empty where there is none."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""

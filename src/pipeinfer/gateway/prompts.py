"""From a chat's messages to what the chat template gets.

Knows the schema of requests; no token and no output.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from pipeinfer.gateway.errors import ApiError, required
from pipeinfer.gateway.schema import (
    MAX_MESSAGES,
    ChatMessage,
    ChatRequest,
    ContentPart,
)
from pipeinfer.gateway.tool_parsers.harmony import (
    check_reasoning_effort,
    harmony_messages,
    with_descriptions,
)
from pipeinfer.gateway.tool_parsers.registry import OutputParsers
from pipeinfer.gateway.tools import (
    RequestTools,
    check_arguments_size,
    check_sendable,
    function_messages_to_tool_messages,
    request_tools,
    tool_call_for_template,
)
from pipeinfer.params import JsonObject, JsonValue


def _for_template(request: ChatRequest) -> JsonObject:
    """Fields of a chat that its template is given, or that say how it is used."""
    given: JsonObject = {
        "enable_thinking": request.enable_thinking,
        "reasoning_effort": request.reasoning_effort,
        "chat_template": request.chat_template,
        "continue_final_message": request.continue_final_message or None,
        "documents": None if request.documents is None else list[JsonValue](request.documents),
    }
    if request.reasoning_effort == "none" and request.enable_thinking is None:
        given["enable_thinking"] = False
    return {name: value for name, value in given.items() if value is not None}


class ChatPrompt(NamedTuple):
    """What a chat's prompt is made of.

    Attributes:
    - chat: messages, as the chat template wants them
    - arguments: all variables of the template
    - tools: of the request, which are among the variables; None if it has none
    """

    chat: list[JsonObject]
    arguments: JsonObject
    tools: RequestTools | None


def chat_prompt(request: ChatRequest, parsers: OutputParsers) -> ChatPrompt:
    """All of a chat that its prompt depends on, `functions` aside. ApiError 400."""
    chat = _chat(request.messages)
    arguments = {**_for_template(request), **(request.chat_template_kwargs or {})}
    check_sendable("chat_template_kwargs", arguments)
    if request.add_generation_prompt is not None:
        arguments["add_generation_prompt"] = request.add_generation_prompt
    tools = request_tools(request)
    if parsers.harmony:
        check_reasoning_effort(arguments)
        chat = harmony_messages(chat)
    if tools is not None:
        function_tools = (
            with_descriptions(tools.as_functions) if parsers.harmony else tools.as_functions
        )
        arguments["tools"] = list[JsonValue](function_tools)
    return ChatPrompt(chat, arguments, tools)


def _chat(messages: list[ChatMessage]) -> list[JsonObject]:
    """The conversation as chat templates want it."""
    messages = function_messages_to_tool_messages(messages)
    if not 0 < len(messages) <= MAX_MESSAGES:
        reason = f"be at most {MAX_MESSAGES}, not {len(messages)}" if messages else "not be empty"
        raise ApiError(400, f"messages must {reason}", "messages", "invalid_value")
    check_sendable("messages", [call for m in messages for call in m.tool_calls or ()])
    check_arguments_size(call for m in messages for call in m.tool_calls or ())
    return without_billing_header([_message(i, message) for i, message in enumerate(messages)])


def _message(i: int, message: ChatMessage) -> JsonObject:
    """The message as the tokenizer takes it: a content of texts alone, or null where the message
    only calls tools; thoughts under one name; no absent fields."""
    reasoning_texts = (message.reasoning_content, message.thinking, message.reasoning)
    function_tools = next((text for text in reasoning_texts if text is not None), None)
    message = replace(message, reasoning_content=function_tools, thinking=None, reasoning=None)
    plain: JsonObject = msgspec.to_builtins(replace(message, refusal=None))
    if message.tool_calls is not None:
        plain["tool_calls"] = [
            tool_call_for_template(call, f"messages[{i}].tool_calls[{j}]")
            for j, call in enumerate(message.tool_calls)
        ]
    content = message.content
    if message.refusal is not None and not content:
        content = message.refusal
    if isinstance(content, list):
        plain["content"] = [_text_part(i, j, part) for j, part in enumerate(content)]
    elif content is not None:
        plain["content"] = content
    elif message.role == "assistant" and message.tool_calls:
        plain["content"] = None
    else:
        param = f"messages[{i}].content"
        raise ApiError(400, f"{param} must be given", param, "invalid_value")
    if message.role == "developer":  # templates of open models know it as "system"
        plain["role"] = "system"
    return plain


def _text_part(i: int, j: int, part: ContentPart) -> JsonObject:
    """A part of text; what a model refused to say is one as well."""
    where = f"messages[{i}].content[{j}]"
    if part.type not in ("text", "refusal"):
        text = f"{where}.type: {part.type[:100]!r} is not supported, only 'text' is"
        raise ApiError(400, text, f"{where}.type", "unsupported_parameter")
    text = part.text if part.type == "text" else part.refusal
    return {"type": "text", "text": required(text, f"{where}.{part.type}")}


BILLING_HEADER = "x-anthropic-billing-header:"


def without_billing_header(chat: list[JsonObject]) -> list[JsonObject]:
    """The conversation without the billing line at the begin of system messages and of their parts.

    Claude Code begins the system prompt with a line that differs in each request, for its maker's
    accounts. Before all prompts it would keep every one from being found in the prefix cache. What
    is left empty is dropped, unless it is all there is.
    """
    remaining = [message for message in map(_without_line, chat) if message is not None]
    return remaining or chat


def _without_line(message: JsonObject) -> JsonObject | None:
    content = message.get("content")
    if message.get("role") != "system":
        return message
    if isinstance(content, str) and content.startswith(BILLING_HEADER):
        remaining = _without_first_line(content)
        return {**message, "content": remaining} if remaining else None
    if isinstance(content, list) and any(
        _part_text(part).startswith(BILLING_HEADER) for part in content
    ):
        texts = [_without_first_line(text) for text in map(_part_text, content)]
        parts: list[JsonValue] = [{"type": "text", "text": text} for text in texts if text]
        return {**message, "content": parts} if parts else None
    return message


def _part_text(part: JsonValue) -> str:
    return str(part["text"]) if isinstance(part, dict) else ""


def _without_first_line(text: str) -> str:
    """Behind the line, if there is one."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING_HEADER) else text

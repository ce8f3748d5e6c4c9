"""From a decoded request to the calls of the core: one for each prompt, each gives one choice.

Knows the schema and the core's events, and nothing about HTTP or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from pipeinfer.gateway.defaults import COMPLETION_MAX_TOKENS
from pipeinfer.gateway.errors import ApiError
from pipeinfer.gateway.events import Call
from pipeinfer.gateway.schema import ChatMessage, ChatRequest, CompletionRequest, Generation
from pipeinfer.messages import pack
from pipeinfer.params import InvalidParameter, SamplingParams, normalized

PLAIN = (  # fields that mean the same in SamplingParams; `stop` is text or a list there as well
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks for; calls[i] makes choice i."""

    calls: list[Call]
    stream: bool
    include_usage: bool


def chat_job(request: ChatRequest, base: str, defaults: SamplingParams, trace: str) -> Job:
    """The one call of a chat; `base` becomes its request id. ApiError 400."""
    if not request.messages:
        raise ApiError(400, "messages must not be empty", "messages", "invalid_value")
    limit, field = request.max_tokens, "max_tokens"
    if limit is None:
        limit = defaults.max_tokens
    if request.max_completion_tokens is not None:
        limit, field = request.max_completion_tokens, "max_completion_tokens"
    chat = [_message(i, message) for i, message in enumerate(request.messages)]
    _check_sendable("messages", chat)
    arguments = dict(request.chat_template_kwargs or {})
    _check_sendable("chat_template_kwargs", arguments)
    if request.add_generation_prompt is not None:
        arguments["add_generation_prompt"] = request.add_generation_prompt
    call = Call(
        base,
        _params(request, defaults, limit, field),
        chat=chat,
        template_arguments=arguments,
        add_special_tokens=bool(request.add_special_tokens),
        **_common(request, trace),
    )
    return _job(request, [call])


def completion_job(
    request: CompletionRequest, base: str, defaults: SamplingParams, trace: str
) -> Job:
    """One call for each prompt, with ids `base`-0, -1 ... if there are several. ApiError 400."""
    limit = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = _params(request, defaults, limit, "max_tokens")
    special = request.add_special_tokens is not False
    common = _common(request, trace)
    prompts = _prompts(request.prompt)
    calls = []
    for i, prompt in enumerate(prompts):
        name = base if len(prompts) == 1 else f"{base}-{i}"
        if isinstance(prompt, str):
            calls.append(Call(name, params, text=prompt, add_special_tokens=special, **common))
        else:
            calls.append(Call(name, params, prompt_ids=pack(prompt), **common))
    return _job(request, calls)


def _job(request: Generation, calls: list[Call]) -> Job:
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        message = "stream_options is only allowed with stream: true"
        raise ApiError(400, message, "stream_options", "invalid_value")
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    return Job(calls, stream, usage)


def _common(request: Generation, trace: str) -> dict[str, Any]:
    return {
        "priority": request.priority or 0,
        "timeout": request.timeout or 0.0,
        "cache_salt": request.cache_salt or "",
        "trace": trace,
    }


def _params(
    request: Generation, defaults: SamplingParams, max_tokens: int | None, field: str
) -> SamplingParams:
    given = {name: getattr(request, name) for name in PLAIN}
    known = {name: value for name, value in given.items() if value is not None}
    try:
        return normalized(msgspec.structs.replace(defaults, **{**known, "max_tokens": max_tokens}))
    except InvalidParameter as error:
        param = field if error.param == "max_tokens" else error.param
        message = str(error).replace("max_tokens must", f"{param} must")
        raise ApiError(400, message, param, "invalid_value") from None


def _prompts(prompt: str | list[int | str | list[int]]) -> list[str] | list[list[int]]:
    """The prompts, all texts or all lists of ids; none of them empty."""
    listed: list[Any] = [prompt]
    if isinstance(prompt, list):
        listed = [prompt] if all(isinstance(item, int) for item in prompt) else prompt
    if len({type(item) for item in listed}) > 1:
        message = "prompt must be a text, a list of token ids, or a list of only one of these"
        raise ApiError(400, message, "prompt", "invalid_type")
    for i, item in enumerate(listed):
        if not item:
            param = "prompt" if listed[0] is prompt else f"prompt[{i}]"
            raise ApiError(400, f"{param} must not be empty", param, "invalid_value")
    return listed


def _check_sendable(param: str, value: Any) -> None:
    """Free-form JSON may hold what the bus cannot carry; one client must not end the stage."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError) as error:
        raise ApiError(400, f"{param}: {error}", param, "invalid_value") from None


def _message(i: int, message: ChatMessage) -> dict[str, Any]:
    """The message as chat templates want it: content as one text, no absent fields."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        plain["content"] = _joined(i, message)
    elif message.content is None:
        if not (message.role == "assistant" and message.tool_calls):
            param = f"messages[{i}].content"
            raise ApiError(400, f"{param} must be given", param, "invalid_value")
        plain["content"] = ""
    if message.role == "developer":  # templates of open models know it as "system"
        plain["role"] = "system"
    return plain


def _joined(i: int, message: ChatMessage) -> str:
    assert isinstance(message.content, list)
    texts = []
    for j, part in enumerate(message.content):
        place = f"messages[{i}].content[{j}]"
        if part.type != "text":
            text = f"{place}.type: {part.type!r} is not supported, only 'text' is"
            raise ApiError(400, text, f"{place}.type", "unsupported_parameter")
        if part.text is None:
            raise ApiError(400, f"{place}.text must be given", f"{place}.text", "invalid_value")
        texts.append(part.text)
    return "\n".join(texts)

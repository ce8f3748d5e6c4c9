"""From a caller's prompts and parameters to calls that the pipeline can carry.

Whatever cannot travel is refused here, before it leaves the caller: a frame that no stage can read
would be dropped, and its request never answered. Knows no pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar, Unpack, cast

import msgspec
import numpy as np

from pipeinfer.gateway.events import Call
from pipeinfer.offline.keywords import is_neutral
from pipeinfer.offline.outputs import OfflineRequest, RequestError
from pipeinfer.offline.sampling import AnyParams, public, wrong_types
from pipeinfer.offline.sampling import SamplingParams as OfCallers
from pipeinfer.other_servers import NO_ADAPTERS, TEXTS_ONLY
from pipeinfer.params import InvalidParameter, JsonObject, JsonValue, SamplingParams, normalized
from pipeinfer.wire import pack

T = TypeVar("T")
Message: TypeAlias = Mapping[str, JsonValue]
# Parts of a message that are texts, and which of their fields is the text.
TEXT_PARTS = {
    "text": "text", "input_text": "text", "output_text": "text",
    "refusal": "refusal", "thinking": "thinking",
}  # fmt: skip
ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


class TextPrompt(TypedDict):
    """A prompt as a dict, as vLLM has it; cache_salt: shares cached prefixes only with the same."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt of token ids as a dict, as vLLM has it. prompt: the text, to be given back."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt


class Options(TypedDict, total=False):
    """What a call may say beside its prompt; see Call."""

    priority: int
    timeout: float
    cache_salt: str
    add_special_tokens: bool


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several: a text, a dict or a sequence of ids is one. Raises RequestError."""
    if not isinstance(prompts, (str, Mapping)) and not hasattr(prompts, "__len__"):
        what = type(prompts).__name__
        message = f"a prompt is text, a list of token ids or a dict with one of them, not {what}"
        raise RequestError(message, "prompts")
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and _is_id(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One chat, or several. Raises RequestError for what is neither."""
    many: list[object] = list(messages) if _is_list(messages) else []
    if many and all(isinstance(one, Mapping) for one in many):
        return [cast("list[Message]", many)]
    if not _is_list(messages) or not all(_is_list(chat) for chat in many):
        form = 'a list of dicts with "role" and "content"'
        raise RequestError(f"messages are a chat, {form}, or a list of chats", "messages")
    return [list(chat) for chat in cast("list[Sequence[Message]]", many)]


def each_params(given: AnyParams | Sequence[AnyParams], count: int) -> list[AnyParams]:
    """Those of each of `count` prompts. Raises ValueError if there are not as many."""
    if isinstance(given, (OfCallers, SamplingParams)):
        return [given] * count
    return each(given, count, "SamplingParams")


def each(given: Sequence[T], count: int, name: str) -> list[T]:
    """One for each of `count` prompts. Raises ValueError if there are not as many."""
    if len(given) != count:
        raise ValueError(f"{count} prompts, but {len(given)} {name}")
    return list(given)


def with_options(
    count: int,
    priority: int | Sequence[int] | None,
    lora_request: object,
    tokenization_kwargs: Mapping[str, object] | None,
    mm_processor_kwargs: Mapping[str, object] | None,
) -> list[Options]:
    """Of each of `count` prompts, from the keywords of vLLM's methods. Raises ValueError if there
    are not as many priorities, RequestError for what there is not."""
    adapters = lora_request if isinstance(lora_request, Sequence) else [lora_request]
    if any(one is not None for one in adapters):
        raise RequestError(f"lora_request: {NO_ADAPTERS}", "lora_request")
    if not is_neutral(mm_processor_kwargs):
        raise RequestError(f"mm_processor_kwargs: {TEXTS_ONLY}", "mm_processor_kwargs")
    given = dict(tokenization_kwargs or {})
    special = bool(given.pop("add_special_tokens", True))
    for name, value in given.items():
        if not is_neutral(value):
            message = f"tokenization_kwargs: {name}: use truncate_prompt_tokens of SamplingParams"
            raise RequestError(message, "tokenization_kwargs")
    if priority is None or isinstance(priority, int):
        priority = [priority or 0] * count
    ranks = each(priority, count, "priorities")
    return [Options(priority=rank, add_special_tokens=special) for rank in ranks]


def check_content_format(name: str) -> None:
    """Raises RequestError for what a template's messages cannot be."""
    if name not in ("auto", "string"):
        param = "chat_template_content_format"
        message = f"{param}={name!r}: parts of type text reach the template as one text"
        raise RequestError(message, param)


def without_texts(given: AnyParams) -> OfCallers:
    """The same, with outputs that have no texts."""
    made = given.clone() if isinstance(given, OfCallers) else public(given)
    made.detokenize = False
    return made


def checked(given: AnyParams) -> SamplingParams:
    """As stages take them. Raises RequestError for a wrong value or type."""
    if not isinstance(given, (OfCallers, SamplingParams)):
        message = f"sampling_params must be SamplingParams, not {type(given).__name__}"
        raise RequestError(message, "params")
    params = given.plain() if isinstance(given, OfCallers) else given
    try:
        params = normalized(params)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    except InvalidParameter as error:
        raise RequestError(str(error), error.param) from None
    except ENCODE_ERRORS as error:
        wrong = ", ".join(wrong_types(params)) or str(error)
        raise RequestError(f"SamplingParams: {wrong}", "params") from None


def completion(
    request_id: str, prompt: Prompt, given: AnyParams, **options: Unpack[Options]
) -> OfflineRequest:
    """What is asked of a text or of token ids. Raises RequestError."""
    params, detokenize, only_prompt = _as_sent(given)
    text, ids, salt = _parts(prompt)
    if salt:
        options["cache_salt"] = salt
    if ids is None:
        call = Call(request_id, params, text=text, **options)
    else:
        call = Call(request_id, params, prompt_ids=_packed(ids), **options)
    return OfflineRequest(_sendable(call, "prompt"), text, detokenize, only_prompt)


class ChatOptions(Options, total=False):
    """What a chat may say beside its messages; None is what is not given.

    chat_template: another template, as text. tools: a variable of it, in OpenAI's form.
    continue_final_message: the last message goes on; add_generation_prompt must be False then.
    """

    chat_template: str | None
    tools: Sequence[JsonObject] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def template_arguments(
    variables: Mapping[str, JsonValue] | None, options: ChatOptions
) -> tuple[JsonObject, Options]:
    """A chat template's variables, with what `options` say of it; and the other options.

    Nothing is said of what is so anyway: some templates take a variable's presence as a wish.
    """
    rest: dict[str, Any] = dict(options)
    arguments: dict[str, Any] = dict(variables or {})
    if rest.pop("add_generation_prompt", True) is False:
        arguments["add_generation_prompt"] = False
    for name in ("chat_template", "continue_final_message"):
        if given := rest.pop(name, None):
            arguments[name] = given
    if tools := rest.pop("tools", None):
        arguments["tools"] = list(tools)
    return arguments, cast(Options, rest)


def chat(
    request_id: str,
    messages: Sequence[Message],
    given: AnyParams,
    arguments: Mapping[str, JsonValue] | None = None,
    **options: Unpack[Options],
) -> OfflineRequest:
    """What is asked of a chat, whose template has these `arguments`. Raises RequestError."""
    params, detokenize, only_prompt = _as_sent(given)
    call = Call(
        request_id,
        params,
        chat=[_message(i, one) for i, one in enumerate(messages)],
        template_arguments=cast(JsonObject, arguments or {}),  # looked at when it is packed
        return_prompt_text=True,
        **options,
    )
    return OfflineRequest(_sendable(call, "messages"), None, detokenize, only_prompt)


def longest_first(batch: Sequence[Call], extra_tokens: Sequence[T]) -> list[tuple[Call, T]]:
    """The calls of a batch with what belongs to each, those that may generate most first.

    A batch is over with its longest request: one that began late would end alone, in steps that
    read all weights for a single token.
    """

    def most(pair: tuple[Call, T]) -> float:
        wanted = pair[0].params.max_tokens
        return float("inf") if wanted is None else wanted

    return sorted(zip(batch, extra_tokens, strict=True), key=most, reverse=True)


def _as_sent(given: AnyParams) -> tuple[SamplingParams, bool, bool]:
    """(as stages take them, whether outputs have texts, whether they have no tokens)."""
    detokenize = True
    if isinstance(given, OfCallers):
        detokenize, given = given.detokenize, given.plain()
    only_prompt = isinstance(given, SamplingParams) and given.max_tokens == 0
    if only_prompt:
        given = msgspec.structs.replace(given, max_tokens=1, min_tokens=0)
    return checked(given), detokenize, only_prompt


def _parts(prompt: Prompt) -> tuple[str | None, Sequence[int] | None, str]:
    """(text, token ids, cache_salt); the text is the prompt where there are no ids."""
    if isinstance(prompt, str):
        return prompt, None, ""
    if not isinstance(prompt, Mapping):
        return None, prompt, ""
    given: dict[str, Any] = dict(prompt)
    text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    salt = given.pop("cache_salt", None) or ""
    for name, value in given.items():
        if not is_neutral(value):
            raise RequestError(f"prompt: {name}: {TEXTS_ONLY}", "prompt")
    if text is None and ids is None:
        raise RequestError('a prompt has "prompt" or "prompt_token_ids"', "prompt")
    return text, ids, salt


def _message(i: int, given: Message) -> JsonObject:
    """With parts that are texts as templates know them. Raises RequestError for what none shows."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise RequestError(f'messages[{i}] must be a dict with a text as its "role"', "messages")
    content = given.get("content")
    if isinstance(content, (list, tuple)):
        parts: list[object] = list(content)
        shown = [_part(f"messages[{i}].content[{j}]", part) for j, part in enumerate(parts)]
        return {**given, "content": shown}
    if content is not None and not isinstance(content, str):
        what = f"must be a text or a list of parts, not {type(content).__name__}"
        raise RequestError(f"messages[{i}].content {what}", "messages")
    return dict(given)


def _part(where: str, part: object) -> JsonValue:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    given = dict(cast("Message", part)) if isinstance(part, Mapping) else {}
    kind = str(given.get("type"))
    field = TEXT_PARTS.get(kind)
    if field is None:
        what = f"a part of type {kind:.60}" if "type" in given else "a part without a type"
        message = f"{where} is {what}. {TEXTS_ONLY} Say it in a part of type text."
        raise RequestError(message, "messages")
    text = given.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field} must be a text", "messages")
    return given if kind == "thinking" else {"type": "text", "text": text}


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _sendable(call: Call, param: str) -> Call:
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=Call)
    except ENCODE_ERRORS as error:
        raise RequestError(f"{param}: {error}", param) from None


def _packed(prompt: Sequence[int]) -> bytes:
    try:
        ids = np.asarray(prompt)
    except ValueError as error:  # lists of different lengths
        raise RequestError(f"a prompt is text or a list of token ids: {error}", "prompt") from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError("a prompt is text or a list of token ids", "prompt")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise RequestError("token ids must be between 0 and 2**31 - 1", "prompt")
    return pack(ids)


def _is_id(value: object) -> bool:
    return isinstance(value, (int, np.integer))
